"""Techniques of rotary positions: which pairs turn, how fast, and in which precision."""

from paceline.lab.technique import Switch, Technique, records

ROTARY: tuple[Technique, ...] = (
    Technique(
        key="rotary-base-1024",
        title="Rotary base 1,024",
        what=(
            "The slowest pair turns once in 2π · 1,024 positions instead of 2π · 10,000. A window never exceeds 1,792 "
            "tokens, so slower pairs would hardly move inside it."
        ),
        formula="ω_j = base^(−exponent_j)",
        record=17,
        presets=records(17, 18),
        switches=(Switch("model.rotary.base", on=1024.0, off=10_000.0),),
        code=("model/rotary.py:frequencies",),
        tests=("model/test_rotary.py::test_records_17_and_18_turn_32_of_64_pairs_and_end_at_one_over_1024",),
        public="No log isolates it.",
        cost="None.",
    ),
    Technique(
        key="truncated-rotary",
        title="Truncated rotary",
        what=(
            "Only half of the pairs of a head turn; the others are free of position and match content at any distance. "
            "The record gives them a frequency of 0 and turns them all the same; here only the turning half is "
            "computed."
        ),
        formula="pairs 0…31 turn, pairs 32…63 rest",
        record=17,
        presets=records(17, 18),
        switches=(Switch("model.rotary.turning_share", on=0.5, off=1.0),),
        code=("model/rotary.py:turning_pairs", "model/rotary.py:rotate"),
        tests=(
            "model/test_rotary.py::test_pairs_at_rest_pass_through_bit_for_bit",
            "model/test_switches.py::test_truncated_rotary_turns_half_as_many_pairs",
        ),
        public="No log isolates it; the scripts save no arithmetic by it.",
        cost="Half of the rotation is saved, and half of the table.",
    ),
    Technique(
        key="closed-spacing",
        title="Closed spacing of the frequencies",
        what=(
            "The exponents of the turning pairs run from 0 to exactly 1, so the slowest frequency is 1/base. The older "
            "open spacing stops one step short of it."
        ),
        formula="exponent_j = j/(n − 1) instead of j/n",
        record=17,
        presets=records(17, 18),
        switches=(Switch("model.rotary.spacing", on="closed", off="open"),),
        code=("model/rotary.py:frequencies",),
        tests=(
            "model/test_rotary.py::test_records_17_and_18_turn_32_of_64_pairs_and_end_at_one_over_1024",
            "model/test_rotary.py::test_records_up_to_13_space_64_frequencies_openly_from_base_10000",
        ),
        public="No log isolates it.",
        cost="None.",
    ),
    Technique(
        key="bf16-rotary-table",
        title="Rotary table in bf16",
        what=(
            "Cosines and sines are stored in bf16, two bytes each. From record 5 on that was wanted; in record 17, "
            "which computes them in fp32, the cast of the whole model swept the tables along. Record 18 keeps them in "
            "fp32."
        ),
        record=5,
        presets=records(5, 17),
        switches=(Switch("model.rotary.table_dtype", on="bf16", off="fp32"),),
        code=("model/rotary.py:rotary_tables",),
        tests=(
            "model/test_rotary.py::test_tables_are_stored_in_the_records_format",
            "model/test_rotary.py::test_the_angle_is_an_fp32_product_even_where_frequency_and_table_are_bf16",
        ),
        public="No log isolates it; whether it saves bandwidth that matters was not measured.",
        cost="Three decimal digits of cosine and sine.",
    ),
    Technique(
        key="bf16-frequencies",
        title="Rotary frequencies rounded to bf16",
        what=(
            "A side effect of record 14: its frequencies became a buffer of the model and were cast with it. Each is "
            "off by up to 0.36 %, the same at every position, so nothing is lost. The angle is still an fp32 product; "
            "rounding the position itself would destroy it past 256."
        ),
        formula="ω_1 = 0.865964 → 0.867188",
        record=14,
        presets=records(14, 16),
        switches=(Switch("model.rotary.frequency_dtype", on="bf16", off="fp32"),),
        code=("model/rotary.py:frequencies", "model/rotary.py:rotary_tables"),
        tests=(
            "model/test_rotary.py::test_records_14_to_16_round_their_frequencies_through_bf16",
            "model/test_rotary.py::test_the_angle_is_an_fp32_product_even_where_frequency_and_table_are_bf16",
        ),
        public="No log isolates it.",
        cost="None to speak of.",
    ),
    Technique(
        key="fp32-rotation",
        title="Rotation in fp32",
        what=(
            "Queries and keys are turned in fp32 and rounded once, to the format they came in. In bf16 each product "
            "and sum rounds anew unless a compiler fuses them."
        ),
        record=17,
        presets=records(4, 4) + records(17, 18),
        switches=(Switch("model.rotary.arithmetic", on="fp32", off="activation"),),
        code=("model/rotary.py:rotate",),
        tests=("model/test_rotary.py::test_fp32_arithmetic_rounds_once_and_activation_arithmetic_more_often",),
        public="No log isolates it.",
        cost="Nothing where the compiler fuses the rotation; two passes in fp32 where it does not.",
    ),
    Technique(
        key="shared-rotary-tables",
        title="One rotary table for all layers",
        what=(
            "Cosines and sines are computed once, for as many positions as the config names, and every layer takes "
            "the rows of its sequence. The originals keep a pair of tables for each attention layer."
        ),
        formula="angle(t, j) = t · ω_j",
        record=17,
        presets=records(4, 18),
        code=("model/rotary.py:rotary_tables", "model/gpt.py:GPT"),
        tests=(
            "model/test_rotary.py::test_shorter_sequences_take_the_first_rows",
            "model/test_rotary.py::test_the_tables_do_not_depend_on_the_model_and_are_not_saved",
        ),
        public=(
            "No log isolates the precomputation; the tables were cached from the first pass on before. The "
            "originals' eleven pairs take 176 MiB in record 17 and 352 MiB in record 18."
        ),
        cost="One pair: 16 MiB in record 18, whose resting pairs need no rows.",
    ),
)
