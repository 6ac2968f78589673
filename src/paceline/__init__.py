"""GPT pre-training as fast as the hardware allows, and what each technique buys."""

__version__ = "0.1.0"
