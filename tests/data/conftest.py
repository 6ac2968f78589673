"""A shared machine makes single examples slow at random, so hypothesis measures no time here."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
