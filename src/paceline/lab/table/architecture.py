"""Techniques of the architecture: shapes, starts, the residual stream, the head."""

import math

from paceline.lab.technique import Switch, Technique, records

ARCHITECTURE: tuple[Technique, ...] = (
    Technique(
        key="padded-head",
        title="Padded head",
        what=(
            "The output head gets rows beyond the vocabulary up to a multiple of 128: 50,304 instead of 50,257. The "
            "largest product of the model then has a size that tensor cores like. The 47 extra columns take part in "
            "the softmax and learn to be improbable; sampling never draws them."
        ),
        formula="rows = 128 · ⌈vocabulary / 128⌉",
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.head_multiple", on=128, off=1),),
        code=("model/config.py:ModelConfig.head_rows", "model/loss.py:head_loss"),
        tests=(
            "recipes/test_records.py::test_rows_of_tables_and_head",
            "model/test_head_loss.py::test_padding_rows_take_part_in_the_softmax",
            "evaluate/test_decode.py::test_padding_rows_of_the_head_are_never_drawn",
        ),
        public="No log isolates it; the 22 % that one description gives it has no ablation behind it.",
        cost="47 rows, 0.09 % of the head; a first loss of ln 50,304 instead of ln 50,257.",
    ),
    Technique(
        key="padded-tables",
        title="Padded tables",
        what=(
            "Token and value tables have the padded number of rows too. A lookup gains nothing by that, but a tied "
            "head is the token table, and equal shapes make checkpoints simpler. Record 17 left the padding off and "
            "record 18 put it back."
        ),
        formula="rows = 128 · ⌈vocabulary / 128⌉",
        record=5,
        presets=records(5, 16) + records(18, 18),
        switches=(Switch("model.embedding_multiple", on=128, off=1),),
        code=("model/config.py:ModelConfig.embedding_rows", "model/embed.py:Embeddings"),
        tests=(
            "recipes/test_records.py::test_rows_of_tables_and_head",
            "model/test_gpt.py::test_full_size_presets_have_the_records_parameters",
        ),
        public="No log isolates it; rows that no token names never receive a gradient.",
        cost="47 unused rows a table: 36,096 numbers each.",
    ),
    Technique(
        key="wide-heads",
        title="Six heads of 128",
        what=(
            "Six attention heads 128 wide instead of twelve 64 wide. Matrices and parameter count stay the same; the "
            "products inside attention become wider and fewer, and a width of 128 is what fused kernels are best at."
        ),
        formula="heads · head width = 768",
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.num_heads", on=6, off=12), Switch("model.head_dim", on=128, off=64)),
        code=("model/attention.py:SelfAttention.project",),
        tests=(
            "model/test_gpt.py::test_full_size_presets_have_the_records_parameters",
            "model/test_attention.py::test_dense_attention_is_the_formula_and_groups_share_key_heads",
        ),
        public="No log isolates it.",
        cost="Half as many attention patterns a layer.",
    ),
    Technique(
        key="separate-qkv",
        title="Separate query, key and value matrices",
        what=(
            "Three matrices of 768 × 768 in place of one of 2,304 × 768. The function is the same. Muon treats the "
            "parts of a fused matrix one by one here, so the switch changes speed and not the update."
        ),
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.qkv", on="separate", off="fused"),),
        code=("model/attention.py:SelfAttention.project", "optim/muon.py:Member"),
        tests=(
            "optim/test_muon.py::test_a_fused_matrix_moves_as_its_parts_would",
            "model/test_gpt.py::test_only_a_fused_matrix_has_parts",
        ),
        public="No log isolates it; record 4 split the fused matrix inside Muon already.",
        cost="Three smaller products instead of one larger one.",
    ),
    Technique(
        key="relu-squared",
        title="Squared ReLU",
        what=(
            "Between the two matrices of the MLP stands max(0, z)² in place of GELU. It is cheaper, exactly zero for "
            "negative inputs, and grows faster than linearly for the others."
        ),
        formula="φ(z) = max(0, z)²",
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.activation", on="relu2", off="gelu"),),
        code=("model/block.py:relu_squared", "model/block.py:MLP"),
        tests=("model/test_gpt.py::test_the_activation_squares_what_is_positive",),
        public="No log isolates it. A comment in the script speaks of 1 to 2 %, the description of 4 %.",
        cost="Elementwise; 0.042 s of a 1.045 s step of record 18's script on one H200 unless fused.",
    ),
    Technique(
        key="zero-init-outputs",
        title="Zero-initialised output matrices",
        what=(
            "The last matrix of attention and of the MLP starts at exactly 0 in every block. The model starts as "
            "embedding and head alone, and each block grows into the stream instead of disturbing it. Under a zero "
            "head the output matrices move first at step 1 and the other block matrices at step 2."
        ),
        formula="W_o = 0, W_down = 0 at step 0",
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.zero_init_outputs", on=True, off=False),),
        code=("model/init.py:_start",),
        tests=(
            "model/test_init.py::test_only_record_4_starts_with_outputs_that_act",
            "model/test_first_steps.py::test_output_matrices_move_at_step_1_and_their_inputs_at_step_2",
            "model/test_first_steps.py::test_record_5_starts_at_sixteen",
        ),
        public="No log isolates it; the 9 % that one description gives it has no ablation behind it.",
        cost="None after the first steps.",
    ),
    Technique(
        key="branch-scale",
        title="Scaled attention branch",
        what=(
            "The output of attention is multiplied by 1/√24, one over the root of twice the depth, so that the stream "
            "does not grow with depth at the start. Zero-initialised outputs do that job better, and record 5 dropped "
            "the factor."
        ),
        formula="x ← x + attention(ρ(x)) / √(2 · layers)",
        presets=records(4, 4),
        switches=(Switch("model.attention_branch_scale", on=1 / math.sqrt(24), off=1.0),),
        code=("model/block.py:Block.forward",),
        tests=("model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",),
        public="No log isolates it; it was in record 4 and in none after it.",
        cost="One multiplication a layer.",
    ),
    Technique(
        key="qk-norm",
        title="QK norm",
        what=(
            "Queries and keys are brought to unit RMS before they meet, without learned weights. Attention scores are "
            "then bounded by √(head width), whatever the projections do, which allows high rates."
        ),
        formula="q ← ρ(q), k ← ρ(k); score = q·k / √128, so |score| ≤ √128",
        record=5,
        presets=records(5, 18),
        switches=(Switch("model.qk_norm", on="before_rotary", off="none", also_on=("after_rotary",)),),
        code=("model/attention.py:SelfAttention.position", "model/norm.py:rms_norm"),
        tests=(
            "model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",
            "model/test_gpt.py::test_the_norm_works_in_fp32_with_the_epsilon_it_is_given",
            "model/test_records.py::test_logits_in_the_records_own_formats",
        ),
        public="No log isolates it; the 7 % that one description gives it has no ablation behind it.",
        cost="Two norms a layer.",
    ),
    Technique(
        key="qk-norm-before-rotary",
        title="QK norm before the rotation",
        what=(
            "The norm of queries and keys is taken before they are turned. A rotation keeps lengths, so in exact "
            "arithmetic the order does not matter; in bf16 the rounding falls in another place, and the tables stay "
            "out of the norm."
        ),
        formula="R ρ(q) = ρ(R q) up to rounding",
        presets=records(13, 18),
        switches=(Switch("model.qk_norm", on="before_rotary", off="after_rotary"),),
        code=("model/attention.py:SelfAttention.position",),
        tests=("model/test_records.py::test_logits_in_the_records_own_formats",),
        public="No log isolates it; it came in one of the records 6 to 13, and the logs read here do not tell which.",
        cost="None.",
    ),
    Technique(
        key="untied-head",
        title="Untied head",
        what=(
            "The head has a matrix of its own instead of being the token table. Each may then have its own start, "
            "rate and format: the table N(0, 1) at a rate of 0.6, the head zero at 0.008. Switching it off must "
            "therefore also bring back the small start and rate of a shared table."
        ),
        record=8,
        presets=records(13, 18),
        switches=(
            Switch("model.tied_head", on=False, off=True),
            Switch("model.embedding_init", on="normal", off="uniform"),
            Switch("optim.adam.embedding_lr", on=0.6, off=0.0036),
        ),
        code=("model/gpt.py:GPT._head_rows", "model/init.py:_start"),
        tests=(
            "model/test_gpt.py::test_the_tied_head_is_the_token_table",
            "model/test_switches.py::test_switches_that_take_something_away",
            "model/test_init.py::test_tables_and_head_start_as_the_record_does",
        ),
        public="No log isolates it.",
        cost="38.6 M parameters more.",
    ),
    Technique(
        key="zero-head",
        title="Zero-initialised head",
        what=(
            "The head starts at 0, so the first prediction is uniform and the first loss is the logarithm of its rows. "
            "Nothing but the head has a gradient in the first step."
        ),
        formula="loss at step 0 = ln 50,304 = 10.8258",
        record=8,
        presets=records(13, 18),
        switches=(Switch("model.head_init", on="zeros", off="uniform"),),
        code=("model/init.py:_start",),
        tests=(
            "model/test_first_steps.py::test_a_zero_head_starts_at_the_logarithm_of_its_rows",
            "model/test_first_steps.py::test_a_zero_head_lets_nobody_else_move_at_step_0",
            "model/test_init.py::test_an_untied_head_may_start_uniform",
        ),
        public="No log isolates it. All logs of records 14 to 18 start at 10.8258.",
        cost="The first step trains the head alone.",
    ),
    Technique(
        key="embedding-norm",
        title="Norm after the embedding",
        what=(
            "The looked-up row is brought to unit RMS before the first block. The stream then starts at a fixed size, "
            "however far the fast rate of the tables has moved them."
        ),
        formula="x0 = ρ(E[token])",
        record=8,
        presets=records(13, 18),
        switches=(Switch("model.embedding_norm", on=True, off=False),),
        code=("model/gpt.py:GPT._stream_of",),
        tests=(
            "model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",
            "model/test_switches.py::test_switched_off_among_others_it_only_takes_away",
        ),
        public="No log isolates it.",
        cost="One norm a pass.",
    ),
    Technique(
        key="x0-mix",
        title="x0 mix",
        what=(
            "Every block first mixes its input with the normed embedding by two learned scalars. The token itself "
            "stays within reach of deep layers without occupying the stream."
        ),
        formula="x ← α x + β x0, starting at (1, 0)",
        record=9,
        presets=records(13, 18),
        switches=(Switch("model.x0_mix", on=True, off=False),),
        code=("model/block.py:Block.forward",),
        tests=(
            "model/test_switches.py::test_a_switch_adds_its_own_weights_and_operations_and_no_others",
            "model/test_init.py::test_scalars_start_so_that_blocks_skips_and_mixes_are_the_records",
        ),
        public="No log isolates it.",
        cost="Two scalars and one pass over the stream a block.",
    ),
    Technique(
        key="unet-skips",
        title="U-Net skips",
        what=(
            "The second half of the blocks adds the outputs of the first half in reverse order, each with a learned "
            "weight that starts at 1. Gradients reach early blocks on a shorter way. The first skip adds the last "
            "output of the first half to itself."
        ),
        formula="x ← x + w_i · s_{5−i} before block 6+i, i = 0…5",
        record=11,
        presets=records(13, 18),
        switches=(Switch("model.unet_skips", on=True, off=False),),
        code=("model/gpt.py:GPT._stream_of",),
        tests=(
            "model/test_gpt.py::test_the_first_skip_adds_block_5_to_itself",
            "model/test_switches.py::test_switched_off_among_others_it_only_takes_away",
        ),
        public="No log isolates it.",
        cost="Six scalars; six outputs are kept during the forward pass.",
    ),
    Technique(
        key="dropped-attention",
        title="Block 7 without attention",
        what=(
            "The eighth block has no attention sub-layer. Its MLP, its mix with x0 and its skip stay, so there are "
            "still twelve blocks. One of twelve attentions and four of its matrices are saved."
        ),
        record=17,
        presets=records(17, 18),
        switches=(Switch("model.layers_without_attention", on=(7,), off=()),),
        code=("model/block.py:Block", "model/config.py:ModelConfig.attentionless"),
        tests=(
            "model/test_gpt.py::test_block_7_loses_its_attention_and_nothing_else",
            "model/test_gpt.py::test_layers_without_attention_may_be_counted_from_the_end",
        ),
        public="No log isolates it. It takes 2.36 M of 84.9 M block weights away.",
        cost="Saves time; 44 square matrices are left, which eight ranks cannot share evenly.",
    ),
    Technique(
        key="softcap",
        title="Logit softcap",
        what=(
            "Logits pass through a scaled tanh, which leaves small ones alone and bounds large ones by c. No token can "
            "be given a probability of practically one, and the gradient of a confident mistake stays finite."
        ),
        formula="logits ← c · tanh(logits / c)",
        record=9,
        presets=records(13, 18),
        switches=(Switch("model.softcap", on=15.0, off=None, also_on=(30.0,)),),
        code=("model/loss.py:cap_logits", "kernels/head_loss.py:head_loss_chunked"),
        tests=(
            "model/test_gpt.py::test_the_cap_bounds_logits_and_keeps_small_ones",
            "model/test_gpt.py::test_without_a_cap_logits_are_only_cast",
            "model/test_head_loss.py::test_loss_and_gradients_are_the_formula",
        ),
        public="No log isolates it.",
        cost=(
            "Elementwise over all logits. Cap, log-softmax and loss take 0.102 s of a 1.045 s step of record 18's "
            "script on one H200."
        ),
    ),
    Technique(
        key="softcap-15",
        title="Softcap 15 instead of 30",
        what=(
            "The cap is halved. Its author's argument is that stronger structure helps a small model. It came with a "
            "run that is a hundred steps shorter at an equal final loss."
        ),
        formula="c = 15",
        record=18,
        presets=records(18, 18),
        switches=(Switch("model.softcap", on=15.0, off=30.0),),
        code=("model/loss.py:cap_logits",),
        tests=(
            "model/test_gpt.py::test_the_models_logits_stay_below_its_cap",
            "recipes/test_records.py::test_a_setting_has_the_records_value_in_all_eight",
        ),
        public=(
            "No log isolates it, but it is the largest change of its record. At step 750, both at the full rate, the "
            "single logs read 3.5539 with 30 and 3.5205 with 15; the window there is 7 blocks in one and 8 in the "
            "other."
        ),
        cost="None.",
    ),
)
