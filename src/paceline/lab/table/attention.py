"""Techniques of attention: who may attend to whom, how that is computed, how long a sequence is."""

from paceline.lab.technique import Given, Switch, Technique, records

WINDOWED = ("tokens", "tokens_in_blocks", "blocks")

ATTENTION: tuple[Technique, ...] = (
    Technique(
        key="document-mask",
        title="Document mask",
        what=(
            "A token attends only inside its own document. End-of-text opens a document: it belongs to the text after "
            "it. Rotary positions and the loss know no documents."
        ),
        formula="doc(t) = number of end-of-text tokens at positions ≤ t; allowed only where doc(q) = doc(k)",
        record=12,
        presets=records(13, 18),
        switches=(Switch("model.document_mask", on=True, off=False),),
        code=("model/masks.py:document_ids", "model/masks.py:allowed"),
        tests=(
            "model/test_masks.py::test_end_of_text_opens_a_document",
            "model/test_masks.py::test_the_dense_mask_is_the_records_rule",
            "model/test_gpt.py::test_a_token_sees_nothing_after_it_and_nothing_before_its_document",
        ),
        public="No log isolates it.",
        cost="Blocks on a border need an element test.",
    ),
    Technique(
        key="token-window",
        title="Window in tokens",
        what=(
            "A query sees the last W tokens of its document. W follows the step and changes in steps of 64, which does "
            "not fit blocks of 128: at every window some blocks must be tested element by element."
        ),
        formula="q − k < W",
        presets=records(13, 14),
        switches=(
            Switch("model.window.unit", on="tokens", off="none"),
            Switch("model.window.start_tokens", on=64, off=128),
            Switch("model.window.quantum_tokens", on=64, off=128),
        ),
        code=("model/masks.py:allowed", "model/config.py:WindowConfig.tokens_at"),
        tests=(
            "model/test_masks.py::test_a_query_deep_in_a_document_sees_as_many_keys_as_the_record_says",
            "recipes/test_records.py::test_the_window_at_every_step",
        ),
        public="No log isolates it. The logs read here have it from record 13 on.",
        cost="Off, a query sees its whole document, up to 65,536 tokens.",
    ),
    Technique(
        key="block-cut-window",
        title="Token window cut at block borders",
        what=(
            "Record 15 built its list of blocks by hand, and that list ends a window at a block border even where the "
            "token rule would reach further. It was probably not meant; it is kept because the record trained so."
        ),
        formula="q − k < W and ⌊q/128⌋ − ⌊k/128⌋ < ⌈W/128⌉",
        record=15,
        presets=records(15, 15),
        switches=(Switch("model.window.unit", on="tokens_in_blocks", off="tokens"),),
        code=("model/masks.py:allowed", "model/masks.py:MaskRule"),
        tests=(
            "model/test_masks.py::test_a_query_deep_in_a_document_sees_as_many_keys_as_the_record_says",
            "model/test_masks.py::test_full_blocks_and_tested_partial_blocks_make_up_the_mask",
        ),
        public="No log isolates it.",
        cost="A query at the start of a block sees up to 127 tokens less.",
    ),
    Technique(
        key="block-window",
        title="Window in blocks",
        what=(
            "The window counts blocks of 128 tokens: a query sees its own block up to itself and the n − 1 blocks "
            "before. How far it sees depends on its place in the block, and no block is cut by the window, so only "
            "document borders and the diagonal need an element test."
        ),
        formula="⌊q/128⌋ − ⌊k/128⌋ < n; keys seen = 128 (n − 1) + q mod 128 + 1",
        record=16,
        presets=records(16, 18),
        switches=(
            Switch("model.window.unit", on="blocks", off="tokens"),
            Switch("model.window.start_tokens", on=128, off=64),
            Switch("model.window.quantum_tokens", on=128, off=64),
        ),
        code=("model/masks.py:allowed", "model/masks.py:blocks_of_window"),
        tests=(
            "model/test_masks.py::test_blocks_are_visited_and_full_by_the_formulas_of_record_16",
            "model/test_masks.py::test_in_a_window_of_one_block_the_first_token_of_a_block_sees_only_itself",
            "recipes/test_records.py::test_the_window_changes_at_the_records_steps",
        ),
        public="No log isolates it; with the rest of record 16 a step went from 161.13 to 157.15 ms.",
        cost="In a window of one block the first token of each block sees only itself.",
    ),
    Technique(
        key="window-warmup",
        title="Window warm-up",
        what=(
            "The window grows along a line with the step, from one block to fourteen. Early steps learn what is near "
            "and are cheap; the last ones see 1,792 tokens. Validation uses the window of its step."
        ),
        formula="W(s) = quantum · ⌊(start + 1,728 · s/N) / quantum⌋",
        record=13,
        presets=records(13, 18),
        switches=(
            Switch("model.window.start_tokens", on=128, off=1792, also_on=(64,)),
            Switch("model.window.growth_tokens", on=1728, off=0),
        ),
        given=(Given("model.window.unit", WINDOWED),),
        code=("model/config.py:WindowConfig.tokens_at", "train/loop.py:Trainer.window_at"),
        tests=(
            "recipes/test_records.py::test_the_window_at_every_step",
            "recipes/test_records.py::test_the_window_changes_at_the_records_steps",
            "model/test_config.py::test_every_accepted_window_stays_between_one_quantum_and_the_widest",
        ),
        public=(
            "No log isolates it. Record 18's script on one H200 takes 0.925 s a step at one block, 1.08 s at fourteen "
            "and 1.032 s on average, so a full window throughout would cost about 5 % more time."
        ),
        cost="Losses before the end are those of a short context.",
    ),
    Technique(
        key="window-as-tensor",
        title="The window is a tensor",
        what=(
            "The current window enters the model as a 0-D integer on the device. Compiled code reads it as any input, "
            "so a whole schedule runs through one graph and a change costs no compilation."
        ),
        presets=records(13, 18),
        given=(Given("model.window.unit", WINDOWED),),
        code=("train/loop.py:Trainer", "model/masks.py:block_lists"),
        tests=("model/test_attention.py::test_a_whole_window_schedule_compiles_once",),
        public="No log isolates it.",
        cost="The reference path computes up to the widest window and masks what is beyond the current one.",
    ),
    Technique(
        key="block-lists",
        title="Full and partial block lists",
        what=(
            "Pairs of blocks are sorted into full ones, where every query sees every key, partial ones, which are "
            "tested element by element, and the rest, which is never visited. The sorting is done from the first and "
            "last document of each block and changes no result."
        ),
        formula=(
            "visit: i ≥ j, i − j < n, lo_i ≤ hi_j, lo_j ≤ hi_i; full: also i > j, lo_i = hi_j, lo_j = hi_i; "
            "the diagonal is always partial"
        ),
        record=16,
        presets=records(13, 18),
        given=(Given("model.document_mask", (True,)),),
        code=("model/masks.py:block_lists", "kernels/attention.py:flex_block_mask"),
        tests=(
            "model/test_masks.py::test_full_blocks_and_tested_partial_blocks_make_up_the_mask",
            "model/test_masks.py::test_blocks_are_visited_and_full_by_the_formulas_of_record_16",
            "model/test_masks.py::test_the_diagonal_keeps_the_share_of_full_blocks_at_13_in_14",
            "model/test_flex.py::test_ordered_lists_hold_the_same_blocks_members_first_and_ascending",
        ),
        public=(
            "No log isolates it; with the rest of record 16 a step went from 161.13 to 157.15 ms. At most 13 of 14 "
            "visited blocks can be full; on the en-140M track 36, 66 and 76 % are at windows of 2, 7 and 14 blocks."
        ),
        cost="A T/128 × T/128 table a pass.",
    ),
    Technique(
        key="flex-attention",
        title="FlexAttention",
        what=(
            "On a GPU, masked attention is one compiled kernel that walks the block lists. The plain path in PyTorch "
            "defines the result and runs anywhere; the kernel must agree with it in value and gradient."
        ),
        record=12,
        presets=records(13, 18),
        switches=(Switch("attention.backend", on="auto", off="reference", also_on=("flex",)),),
        given=(Given("model.document_mask", (True,)),),
        code=("kernels/attention.py:attend_flex", "model/attention.py:plan_flex", "core/probe.py:choose_attention"),
        tests=(
            "model/test_flex.py::test_uncompiled_flex_attention_gives_the_reference",
            "model/test_flex_gpu.py::test_flex_equals_the_reference_in_value_and_gradient",
            "core/test_probe.py::test_on_a_gpu_flex_is_taken_if_it_can_be_compiled",
        ),
        public="No log isolates it.",
        cost="0.118 s backward and 0.045 s forward of a 1.045 s step of record 18's script on one H200.",
    ),
    Technique(
        key="grouped-query",
        title="Grouped-query attention",
        what=(
            "Several query heads share one key and value head, which shrinks those matrices, the value tables and a "
            "cache for sampling. Record 16 set a flag of that name with as many key heads as query heads, which does "
            "nothing; here the number of key heads is a setting."
        ),
        formula="query head h reads key head ⌊h · H_kv / H⌋",
        presets=(),
        switches=(Switch("model.num_kv_heads", on=2, off=None),),
        code=("model/config.py:ModelConfig.kv_width", "kernels/attention.py:_expand_groups"),
        tests=(
            "model/test_attention.py::test_a_model_with_shared_key_heads_is_one_with_repeated_key_heads",
            "metrics/test_flops.py::test_grouped_heads_shrink_keys_and_values_only",
            "model/test_flex_gpu.py::test_flex_with_grouped_heads_equals_the_reference",
        ),
        public="No record groups heads; record 17 removed the flag again.",
        cost="Fewer key and value weights to learn with; what that costs in loss is not measured here.",
    ),
    Technique(
        key="long-sequences",
        title="Sequences of 65,536 tokens",
        what=(
            "A rank's whole share of a step is one sequence. With a document mask and a window that costs no more "
            "attention than short rows do, and documents are cut far less often. Positions need a rotary table of the "
            "same length."
        ),
        record=12,
        presets=records(13, 18),
        switches=(
            Switch("batch.sequence_tokens", on=65_536, off=1024),
            Switch("model.rotary.max_tokens", on=65_536, off=1024),
        ),
        code=("data/config.py:BatchConfig", "kernels/attention.py:attend_chunked"),
        tests=(
            "model/test_attention.py::test_past_4096_tokens_the_reference_works_by_chunks",
            "data/test_batches.py::test_the_records_validation_is_160_sequences",
        ),
        public="No log isolates it.",
        cost="Needs attention whose memory does not grow with the square of the length.",
    ),
    Technique(
        key="any-length",
        title="Any length of whole blocks",
        what=(
            "The number of blocks follows from the sequence, so any multiple of 128 tokens up to the rotary table "
            "works; without windows in blocks any length does. Records 16 and 17 had the number 512 written into them."
        ),
        formula="blocks = T / 128",
        record=18,
        presets=records(4, 18),
        code=("train/config.py:RunConfig._check_lengths", "model/masks.py:block_lists"),
        tests=(
            "model/test_attention.py::test_past_4096_tokens_the_reference_works_by_chunks",
            "model/test_rotary.py::test_shorter_sequences_take_the_first_rows",
            "test_cli.py::test_a_mistake_costs_one_line_and_exit_code_2",
        ),
        public="Nothing to measure; every record trains at one length.",
        cost="None.",
    ),
)
