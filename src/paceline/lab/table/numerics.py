"""Techniques of number formats: what is stored, multiplied and normed in which precision."""

from paceline.lab.technique import Given, Switch, Technique, records

BF16_EPS, FP32_EPS = 2.0**-7, 2.0**-23

NUMERICS: tuple[Technique, ...] = (
    Technique(
        key="norm-epsilon",
        title="ε of the norm as a number",
        what=(
            "The records call the built-in RMS norm without an ε. Until January 2025 that meant the machine epsilon of "
            "the input's format: 2⁻⁷ for bf16, 2⁻²³ for fp32. A newer framework takes another number, so the presets "
            "write it down. With 2⁻⁷ a stream of small size is visibly damped."
        ),
        formula="ρ(x) = x / √(mean(x²) + ε)",
        record=5,
        presets=records(5, 18),
        switches=(
            Switch("model.norm_eps", on=BF16_EPS, off=1e-6, also_on=(FP32_EPS,)),
            Switch("model.qk_norm_eps", on=BF16_EPS, off=1e-6),
        ),
        code=("model/norm.py:rms_norm", "recipes/records.py:BF16_EPS"),
        tests=(
            "model/test_gpt.py::test_the_norm_works_in_fp32_with_the_epsilon_it_is_given",
            "model/test_first_steps.py::test_record_5_would_start_near_eleven_with_the_epsilon_of_bf16",
        ),
        public=(
            "Not a choice of the records. The first loss of record 5, 16.0058, shows that its residual norms had the "
            "ε of fp32; with that of bf16 it would have been near 11."
        ),
        cost="None.",
    ),
    Technique(
        key="bf16-activations",
        title="Residual stream in bf16",
        what=(
            "The stream itself is in bf16, instead of an fp32 stream whose products are cast one by one. Every "
            "elementwise pass moves half the bytes. The ε of the norms follows the format of the stream."
        ),
        record=10,
        presets=records(13, 18),
        switches=(
            Switch("model.precision.mode", on="explicit", off="autocast"),
            Switch("model.norm_eps", on=BF16_EPS, off=FP32_EPS),
        ),
        code=("model/embed.py:Embeddings.forward", "model/linear.py:linear"),
        tests=("model/test_records.py::test_logits_in_the_records_own_formats",),
        public="No log isolates it.",
        cost="Eight bits of significand in the sum over all blocks.",
    ),
    Technique(
        key="bf16-tables",
        title="Tables in bf16",
        what=(
            "Token and value tables, their gradients and both Adam moments are stored in bf16. They are most of the "
            "parameters, so this decides memory and traffic. Late in the cool-down an update below half a bf16 step "
            "is lost."
        ),
        presets=records(13, 18),
        switches=(Switch("model.precision.embeddings", on="bf16", off="fp32"),),
        code=("model/embed.py:Embeddings", "optim/adam.py:AdamGroup"),
        tests=(
            "model/test_init.py::test_each_class_is_stored_in_the_records_format",
            "optim/test_adam.py::test_bf16_is_fp32_arithmetic_rounded_once",
        ),
        public="No log isolates it; it came in one of the records 6 to 13, and the logs read here do not tell which.",
        cost="Small updates vanish.",
    ),
    Technique(
        key="whole-model-cast",
        title="Whole model cast, matrices cast back",
        what=(
            "Up to record 17 the whole model is cast to bf16 and the linear layers then back to fp32. Two things "
            "follow: the matrices start from rounded values, and the learned scalars stay in bf16."
        ),
        presets=records(13, 17),
        switches=(
            Switch("model.precision.round_matrices_at_init", on=True, off=False),
            Switch("model.precision.scalars", on="bf16", off="fp32"),
        ),
        code=("model/init.py:_start", "model/config.py:PrecisionConfig"),
        tests=(
            "model/test_init.py::test_records_13_to_17_start_from_matrices_rounded_through_bf16",
            "model/test_init.py::test_each_class_is_stored_in_the_records_format",
        ),
        public="No log isolates it; it came in one of the records 6 to 13, and the logs read here do not tell which.",
        cost="Scalars move in steps of a bf16 unit.",
    ),
    Technique(
        key="selective-bf16",
        title="Selective bf16",
        what=(
            "Only the tables are cast to bf16. Matrices start unrounded, scalars are fp32, and the rotary tables keep "
            "their precision. Products are in bf16 all the same."
        ),
        record=18,
        presets=records(18, 18),
        switches=(
            Switch("model.precision.scalars", on="fp32", off="bf16"),
            Switch("model.precision.round_matrices_at_init", on=False, off=True),
            Switch("model.rotary.table_dtype", on="fp32", off="bf16"),
        ),
        given=(Given("model.precision.embeddings", ("bf16",)),),
        code=("model/config.py:PrecisionConfig", "model/init.py:_start"),
        tests=(
            "model/test_init.py::test_each_class_is_stored_in_the_records_format",
            "model/test_rotary.py::test_tables_are_stored_in_the_records_format",
        ),
        public="No log isolates it; peak memory rose from 31,361 to 31,563 MiB with record 18.",
        cost="176 MiB more rotary tables in the original; here the layers share one pair.",
    ),
    Technique(
        key="plain-validation",
        title="Validation without autograd, in the training precision",
        what=(
            "Record 4 validated without autograd but in fp32; record 5 in low precision but with autograd recording, "
            "so that each batch's loss had to be deleted by hand. Both good halves go together here: no graph is "
            "recorded, and the numbers are those of training."
        ),
        record=5,
        presets=records(4, 18),
        code=("evaluate/validation.py:validate", "train/loop.py:Trainer.evaluate"),
        tests=(
            "train/test_run.py::test_a_run_learns_and_its_card_says_so",
            "data/test_batches.py::test_validation_reads_the_first_tokens_in_whole_sequences",
        ),
        public="Validation is outside of the records' clock, so it bought them nothing.",
        cost="None.",
    ),
)
