"""Techniques of compiler, memory and processes. None of them changes a result."""

from paceline.lab.technique import Measurement, Switch, Technique, records

PRESET_ONLY = "recipes/test_records.py::test_a_setting_has_the_records_value_in_all_eight"
"""Proves the preset's value; what it does to speed shows only on the hardware."""

MACHINE: tuple[Technique, ...] = (
    Technique(
        key="compile",
        title="Compiled model",
        what=(
            "The model is compiled as one graph, and so is the Newton–Schulz iteration. Chains of elementwise "
            "operations then become one kernel that rounds once. The first steps pay for it, and the records' clock "
            "does not count them."
        ),
        presets=records(4, 18),
        switches=(Switch("train.compile", on=True, off=False),),
        code=("train/assemble.py:assemble", "optim/optimizer.py:_newton_schulz"),
        tests=(
            "model/test_attention.py::test_a_whole_window_schedule_compiles_once",
            "optim/test_newton_schulz.py::test_it_compiles_as_one_graph",
        ),
        public="In all eight records. Before the clock starts, compiling takes 23 to 55 s, 247 s from a cold cache.",
        cost="That time at every start.",
    ),
    Technique(
        key="coordinate-descent",
        title="Coordinate-descent tuning",
        what=(
            "The compiler tries variations of each kernel and keeps the faster one. Starting takes longer, running "
            "may be quicker. Record 18 turned it off."
        ),
        presets=records(4, 17),
        switches=(Switch("train.coordinate_descent", on=True, off=False),),
        code=("train/assemble.py:set_global_switches",),
        tests=(
            "train/test_machine_switches.py::test_the_compiler_tunes_only_if_asked_to",
            "train/test_machine_switches.py::test_a_tuned_model_is_the_uncompiled_one_up_to_rounding",
        ),
        public="No log isolates it; record 18's steps are 2.8 % slower than record 17's (148.08 against 144.00 ms).",
        cost="Minutes of tuning at every start from a cold cache.",
        measurements=(
            Measurement(
                said=(
                    "Until the clock starts, after ten steps, record 17 with tuning takes {0[first_steps_s]:.1f} s "
                    "and record 18 without it {1[first_steps_s]:.1f} s, which is not all due to the tuning."
                ),
                files=("h200-r17-95.json", "h200-r18-95.json"),
            ),
        ),
    ),
    Technique(
        key="skipped-guards",
        title="Guards skipped",
        what=(
            "After five steps compiled code stops checking whether it still fits its inputs. Shapes never change here, "
            "so the checks are wasted. It does not touch graph breaks, of which there are none."
        ),
        record=16,
        presets=records(16, 17),
        switches=(Switch("train.skip_guards", on=True, off=False),),
        code=("train/loop.py:Trainer._guards",),
        tests=("train/test_machine_switches.py::test_after_five_steps_guards_are_skipped_and_no_bit_changes",),
        public="No log isolates it; with the rest of record 16 a step went from 161.13 to 157.15 ms.",
        cost="A changed shape would go unnoticed.",
    ),
    Technique(
        key="expandable-segments",
        title="Expandable segments",
        what=(
            "The CUDA allocator grows its segments instead of adding new ones, which leaves fewer holes. Record 17 "
            "sets it and record 18 does not."
        ),
        record=17,
        presets=records(17, 17),
        switches=(Switch("train.expandable_segments", on=True, off=False),),
        code=("train/assemble.py:set_global_switches",),
        tests=(
            "train/test_machine_switches.py::test_the_allocator_expands_its_segments_only_if_asked_to",
            "train/test_machine_switches_gpu.py::test_segments_expand_only_if_asked_to_and_no_loss_changes",
        ),
        public="No log isolates it. Record 17 allocates 31,361 MiB at its peak and reserves 36,734.",
        cost="None known.",
    ),
    Technique(
        key="bucket-views",
        title="Gradients as views of their buckets",
        what=(
            "Gradients live inside the buffers that ranks exchange instead of being copied into them and back. That "
            "saves one copy of all gradients. Between the micro-batches of a step they stay there, which is why they "
            "are then set to zero in place. It matters only with several processes."
        ),
        record=16,
        presets=records(16, 18),
        switches=(Switch("parallel.bucket_views", on=True, off=False),),
        code=(
            "parallel/gradients.py:replicate",
            "parallel/gradients.py:zero_in_place_",
            "parallel/config.py:ParallelConfig.bucket_views",
        ),
        tests=("parallel/test_series.py::test_gradients_are_views_of_the_buckets_if_asked", PRESET_ONLY),
        public=(
            "No log isolates it: record 15's memory was not logged. One copy of record 16's gradients is 1.04 GB, 3 % "
            "of its peak."
        ),
        cost="None.",
    ),
    Technique(
        key="no-buffer-broadcast",
        title="No broadcast of buffers",
        what=(
            "Ranks do not send each other their buffers before each forward pass. The only buffers are rotary tables, "
            "equal everywhere from the start."
        ),
        record=16,
        presets=records(16, 18),
        switches=(Switch("parallel.broadcast_buffers", on=False, off=True),),
        code=("parallel/gradients.py:replicate", "parallel/config.py:ParallelConfig.broadcast_buffers"),
        tests=("parallel/test_series.py::test_buffers_are_broadcast_if_asked", PRESET_ONLY),
        public="No log isolates it.",
        cost="None.",
    ),
)
