"""Techniques of the value path: what is mixed into the values that attention passes on."""

from paceline.lab.technique import Given, Switch, Technique, records

WITH_TABLES = ("layerwise", "mirrored", "sparse")

VALUES: tuple[Technique, ...] = (
    Technique(
        key="value-residual",
        title="Value residual",
        what=(
            "Each layer mixes the values of block 0 into its own by one learned scalar. Deep layers keep a direct view "
            "of what the tokens said at the start. Block 0 mixes with itself, which changes nothing."
        ),
        formula="v_ℓ ← (1 − λ) v_ℓ + λ v_0, λ starting at 0.5",
        record=9,
        presets=records(13, 13),
        switches=(
            Switch("model.value_path", on="residual", off="plain"),
            Switch("model.value_lambdas", on=1, off=2),
        ),
        code=("model/attention.py:SelfAttention.mix_values", "model/gpt.py:_Values.remember"),
        tests=(
            "model/test_gpt.py::test_in_record_13_block_0_mixes_with_itself",
            "model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",
        ),
        public="No log isolates it; record 14 replaced it by tables.",
        cost="Block 0's values are kept for the whole pass.",
    ),
    Technique(
        key="value-embeddings",
        title="Value embeddings",
        what=(
            "Besides the token table there are tables whose rows are added to the values inside attention, looked up "
            "by the input token and neither normed nor projected. They hold most of the parameters and cost hardly any "
            "arithmetic. Record 14 has one for each layer; later records have six and then three."
        ),
        formula="v_ℓ ← (1 − λ) v_ℓ + λ e_ℓ(token), or λ0 v_ℓ + λ1 e_ℓ(token)",
        record=14,
        presets=records(14, 18),
        switches=(Switch("model.value_path", on="sparse", off="plain", also_on=("layerwise", "mirrored")),),
        code=(
            "model/embed.py:Embeddings.value_rows",
            "model/attention.py:SelfAttention.mix_values",
            "model/config.py:ModelConfig.value_table_of_layer",
        ),
        tests=(
            "model/test_gpt.py::test_layers_look_up_the_records_tables",
            "model/test_gpt.py::test_maps_at_another_depth_are_resolved_from_both_ends",
            "model/test_gpt.py::test_a_value_table_exists_where_an_attention_asks_for_it_and_is_trained",
            "model/test_records.py::test_loss_and_every_gradient_in_fp32",
        ),
        public=(
            "Record 14 is almost this alone: 12.6 % fewer steps (1,750 to 1,530) at an equal loss, each of them 8.4 % "
            "slower (160.67 to 174.10 ms), so 5.3 % less time."
        ),
        cost=(
            "463.6 M parameters for twelve tables; gradients exchanged a step grow from 0.57 to 1.50 GB a rank, and "
            "weights, gradients and moments of the tables take 3.7 GB."
        ),
    ),
    Technique(
        key="mirrored-values",
        title="Mirrored value tables",
        what=(
            "Six tables serve twelve layers: layer ℓ and layer 11 − ℓ look up the same one, as the skips pair them. "
            "That halves the tables, and each row gets the gradients of both its layers."
        ),
        formula="table(ℓ) = min(ℓ, 11 − ℓ)",
        record=15,
        presets=records(15, 16),
        switches=(Switch("model.value_path", on="mirrored", off="layerwise"),),
        code=("model/config.py:ModelConfig.value_table_of_layer",),
        tests=(
            "model/test_gpt.py::test_layers_look_up_the_records_tables",
            "model/test_gpt.py::test_a_row_of_a_mirrored_table_gets_the_gradients_of_both_its_layers",
        ),
        public="No log isolates it.",
        cost="231.8 M parameters instead of 463.6 M.",
    ),
    Technique(
        key="sparse-values",
        title="Sparse value tables",
        what=(
            "Three tables serve the first three and the last three layers, in the same order at both ends; the six in "
            "the middle have none and only scale their values by a learned scalar that starts at 0.5. The pattern is "
            "0 1 2 · · · · · · 0 1 2, which is no longer a mirror."
        ),
        formula="table(ℓ) = ℓ for ℓ < 3, ℓ − 9 for ℓ > 8, none otherwise",
        record=17,
        presets=records(17, 18),
        switches=(Switch("model.value_path", on="sparse", off="mirrored"),),
        code=("model/config.py:ModelConfig.value_table_of_layer",),
        tests=(
            "model/test_gpt.py::test_layers_look_up_the_records_tables",
            "model/test_first_steps.py::"
            "test_layers_without_a_table_still_scale_their_values_and_leave_the_other_scalar_alone",
        ),
        public="No log isolates it. With the rest of record 17, peak memory fell from 34,239 to 31,361 MiB.",
        cost="115.8 M parameters instead of 231.8 M.",
    ),
    Technique(
        key="value-two-scalars",
        title="Two value scalars",
        what=(
            "Own values and looked-up ones have a scalar each instead of sharing one between them. The size of the "
            "values is free then, and a layer without a table can still scale its own."
        ),
        formula="v ← λ0 v + λ1 e, both starting at 0.5",
        record=15,
        presets=records(15, 18),
        switches=(Switch("model.value_lambdas", on=2, off=1),),
        given=(Given("model.value_path", ("residual", *WITH_TABLES)),),
        code=("model/attention.py:SelfAttention.mix_values",),
        tests=(
            "model/test_gpt.py::test_with_two_scalars_block_0_mixes_with_itself_too",
            "model/test_first_steps.py::"
            "test_layers_without_a_table_still_scale_their_values_and_leave_the_other_scalar_alone",
        ),
        public="No log isolates it.",
        cost="One scalar a layer.",
    ),
    Technique(
        key="value-chunks",
        title="Value tables as chunks of one matrix",
        what=(
            "All value tables lie side by side in one wide matrix, and a layer takes its 768 columns. The function is "
            "that of separate tables, which record 16 went over to: one gradient each, and buckets of an even size."
        ),
        record=14,
        presets=records(14, 15),
        switches=(Switch("model.value_storage", on="chunks", off="tables"),),
        given=(Given("model.value_path", WITH_TABLES),),
        code=("model/embed.py:Embeddings", "model/embed.py:Embeddings.value_rows"),
        tests=("model/test_gpt.py::test_chunks_of_one_matrix_are_tables_under_another_name",),
        public="No log isolates it; records 15 and 16 end at the same loss, 3.2785.",
        cost="A gradient as wide as all tables together.",
    ),
    Technique(
        key="late-value-lookup",
        title="Value rows looked up at first use",
        what=(
            "A value table is read when the first of its layers asks, and the rows are kept for the second. The "
            "records look up all tables before the first block. Nothing numeric depends on it."
        ),
        presets=records(14, 18),
        given=(Given("model.value_path", WITH_TABLES),),
        code=("model/gpt.py:_Values.extra",),
        tests=("model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",),
        public="No record does it; one description claims it for record 18.",
        cost="None.",
    ),
)
