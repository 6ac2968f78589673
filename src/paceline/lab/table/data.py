"""Techniques of data and batches: what a step reads, how it is cut, how it reaches the device."""

from paceline.lab.technique import Measurement, Switch, Technique, records

DATA: tuple[Technique, ...] = (
    Technique(
        key="micro-batches",
        title="Micro-batches with a true mean",
        what=(
            "A step is defined by its 524,288 tokens; how many go through the model at a time is a matter of memory. "
            "Losses are summed and divided by the tokens of the whole batch, so the gradient is the mean however the "
            "batch is cut, and ranks exchange it once a step, in the last backward pass. Record 18's loop adds the "
            "means of its micro-batches and exchanges gradients after each."
        ),
        formula="∇ = (1/T) Σ_micro Σ_tokens ∇loss, T the tokens of the whole step",
        record=18,
        presets=records(4, 18),
        code=(
            "train/step.py:accumulate_gradient",
            "parallel/gradients.py:exchange",
            "data/config.py:BatchConfig.micro_sequences",
        ),
        tests=(
            "train/test_run.py::test_the_gradient_is_the_mean_over_the_whole_batch_however_it_is_cut",
            "train/test_run.py::test_micro_batches_change_nothing_but_the_last_digits",
            "parallel/test_series.py::test_gradients_are_exchanged_once_a_step",
            "parallel/test_series.py::test_losses_and_weights_are_those_of_one_process",
        ),
        public=(
            "At eight GPUs every record has one micro-batch, so the logs say nothing. On one GPU the sum in record 18 "
            "leaves Muon alone and makes Adam's ε eight times smaller in effect."
        ),
        cost="None.",
        measurements=(
            Measurement(
                said=(
                    "Record 18 on the en-140M track, {0[steps]} steps on one H200, ends at {0[val_loss]:.4f} with the "
                    "true mean; the original script, which sums, at {0[original][266]:.4f}. Whether the sum is the "
                    "reason is not decided."
                ),
                files=("h200-track-r18-reference.json",),
            ),
        ),
    ),
    Technique(
        key="common-base-order",
        title="One position for all ranks",
        what=(
            "A step reads one stretch of the stream, and ranks divide it; a function of seed and step alone says "
            "where. The data are then the same for any number of processes and a resumed run needs no replay. Up to "
            "record 17 each rank kept a position of its own, and two ran a batch ahead after every shard."
        ),
        formula="before reading: if base + G + 1 ≥ length, next shard from 0; after: base += G",
        record=18,
        presets=records(4, 18),
        switches=(Switch("data.order", on="sequential", off="shuffled"),),
        code=("data/order.py:SequentialOrder", "data/batches.py:share_of"),
        tests=(
            "data/test_batches.py::test_world_size_never_changes_the_global_batch",
            "parallel/test_series.py::test_ranks_together_read_the_batch_of_one",
            "data/test_order.py::test_sequential_is_record_18_walked_step_by_step",
            "data/test_order.py::test_batches_of_a_full_shard_are_the_records",
        ),
        public="No log isolates it. All presets here use it, also those of older records.",
        cost="The last 385,280 tokens of a shard of 100 M are not read.",
    ),
    Technique(
        key="aligned-documents",
        title="Documents aligned to blocks",
        what=(
            "Every document starts at a multiple of 128 tokens and the gap before it is padded; targets there do not "
            "count. More blocks are full then. One description claims this of record 16, which does not do it."
        ),
        presets=(),
        switches=(Switch("data.align_documents", on=True, off=False),),
        code=("data/aligned.py:AlignedCorpus", "data/aligned.py:layout_of"),
        tests=(
            "data/test_batches.py::test_aligned_documents_start_at_multiples_of_128",
            "data/test_batches.py::test_alignment_loses_no_token_of_an_epoch",
            "train/test_run.py::test_aligned_documents_train_and_padding_does_not_count",
        ),
        public="No record has it.",
        cost="64 tokens a document on average, 9 % on the en-140M track.",
    ),
    Technique(
        key="pinned-feed",
        title="Pinned, asynchronous feeding",
        what=(
            "Batches go from pinned memory to the GPU on a stream of their own while the step before computes. The "
            "host never waits. It is still a copy."
        ),
        record=15,
        presets=records(4, 18),
        code=("data/feed.py:feed", "data/feed.py:_start_copy"),
        tests=(
            "data/test_feed.py::test_batches_reach_the_cpu_unchanged",
            "data/test_feed.py::test_feeding_a_gpu_never_waits",
        ),
        public="No log isolates it.",
        cost="One more batch in memory, 6 MB.",
    ),
)
