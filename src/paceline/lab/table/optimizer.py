"""Techniques of the optimizer: Muon, Adam, rates, schedules."""

from paceline.lab.technique import Switch, Technique, records

OPTIMIZER: tuple[Technique, ...] = (
    Technique(
        key="muon",
        title="Muon",
        what=(
            "The matrices inside blocks are moved by the orthogonal factor of their momentum: all directions of a "
            "gradient get the same say, not only the few large ones. Tables, head and scalars stay with Adam."
        ),
        formula="M ← M − lr · g · orthogonal(U), U the Nesterov momentum",
        presets=records(4, 18),
        switches=(Switch("optim.matrices", on="muon", off="adamw"),),
        code=("optim/muon.py:Muon", "optim/optimizer.py:Optimizer"),
        tests=(
            "optim/test_muon.py::test_it_is_the_muon_of_torch",
            "optim/test_muon.py::test_stacks_equal_a_loop_over_single_matrices",
            "optim/test_optimizer.py::test_matrices_follow_muon",
        ),
        public="In all eight records and older than the first of them, so none of their differences measures it.",
        cost="0.060 s of a 1.045 s step of record 18's script on one H200; one momentum buffer instead of two.",
    ),
    Technique(
        key="newton-schulz-bf16",
        title="Newton–Schulz in bf16",
        what=(
            "The orthogonal factor comes from five rounds of an odd quintic instead of a singular value decomposition: "
            "products only, in bf16. Singular values end near 1 and not at 1, which the optimizer does not mind. Ours "
            "runs all matrices of one shape as a batch."
        ),
        formula="X ← aX + b(XXᵀ)X + c(XXᵀ)²X, (a, b, c) = (3.4445, −4.7750, 2.0315), X_0 = U / (‖U‖ + 1e−7)",
        presets=records(4, 18),
        switches=(Switch("optim.muon.ns_dtype", on="bf16", off="fp32"),),
        code=("optim/newton_schulz.py:orthogonalise",),
        tests=(
            "optim/test_newton_schulz.py::test_singular_vectors_stay_and_values_enter_the_band",
            "optim/test_newton_schulz.py::test_the_scalar_map_ends_in_the_band",
            "optim/test_newton_schulz.py::test_zero_in_zero_out",
            "optim/test_newton_schulz_gpu.py::test_bf16_on_a_gpu_stays_near_float64",
        ),
        public="No log isolates it; the alternative by SVD was in the scripts up to record 15 and never used.",
        cost="About 2 TFLOP a step, against 381 for the weights at 524,288 tokens.",
    ),
    Technique(
        key="newton-schulz-norm",
        title="Norm of the rounded matrix",
        what=(
            "Before the iteration a matrix is divided by its norm. Record 5 takes the norm of the bf16 copy and "
            "divides that copy in place; record 4 took it before rounding."
        ),
        formula="X_0 = bf16(U) / (‖bf16(U)‖ + 1e−7)",
        record=5,
        presets=records(5, 18),
        switches=(Switch("optim.muon.ns_norm_of", on="rounded", off="unrounded"),),
        code=("optim/newton_schulz.py:_normalised",),
        tests=(
            "optim/test_newton_schulz.py::test_the_norm_is_taken_on_the_chosen_side_of_the_rounding",
            "optim/test_newton_schulz.py::test_the_guard_is_added_to_the_norm",
            "optim/test_optimizer.py::test_the_side_of_the_norm_reaches_the_iteration",
        ),
        public="No log isolates it; memory was not logged.",
        cost="None.",
    ),
    Technique(
        key="newton-schulz-association",
        title="Polynomial first",
        what=(
            "The quintic is evaluated as a small square matrix that then multiplies X once. Record 5 multiplied X by A "
            "twice. The number is the same up to rounding; for wide matrices this way is cheaper."
        ),
        formula="aX + (bA + cA²)X instead of aX + b(AX) + cA(AX), A = XXᵀ",
        presets=records(13, 18),
        switches=(Switch("optim.muon.ns_association", on="polynomial_first", off="product_first"),),
        code=("optim/newton_schulz.py:_polynomial_first", "optim/newton_schulz.py:_product_first"),
        tests=(
            "optim/test_newton_schulz.py::test_it_is_the_scalar_map_on_singular_values",
            "optim/test_newton_schulz.py::test_fp32_agrees_with_float64",
        ),
        public="No log isolates it; it came in one of the records 6 to 13.",
        cost="None.",
    ),
    Technique(
        key="averaged-momentum",
        title="Averaged momentum",
        what=(
            "The momentum buffer is a running average of gradients instead of a running sum. At a constant μ the two "
            "differ by a factor that orthogonalising removes; while μ warms up they do not point the same way."
        ),
        formula="b ← μb + (1 − μ)G, U = (1 − μ)G + μb, instead of b ← μb + G, U = G + μb",
        record=15,
        presets=records(15, 18),
        switches=(Switch("optim.muon.momentum_form", on="average", off="sum"),),
        code=("optim/muon.py:nesterov_",),
        tests=(
            "optim/test_muon.py::test_sum_and_average_point_the_same_way_while_momentum_is_constant",
            "optim/test_muon.py::test_sum_and_average_part_while_momentum_warms_up",
            "optim/test_muon.py::test_direction_looks_ahead",
        ),
        public="No log isolates it.",
        cost="None.",
    ),
    Technique(
        key="aspect-scale",
        title="Step scaled by aspect",
        what=(
            "A matrix's step is its rate times √max(1, rows/columns): 1 for square ones and for the MLP's second, 2 "
            "for its first. The older rule, √(longest side), gave 27.7 and 55.4 at a rate 139 times smaller. The "
            "off-rate here is 0.05/√768, which leaves the step of a square matrix as it is."
        ),
        formula="g = √max(1, rows/cols) instead of √max(rows, cols)",
        record=8,
        presets=records(13, 18),
        switches=(
            Switch("optim.muon.scale_rule", on="aspect", off="longest_side"),
            Switch("optim.muon.lr", on=0.05, off=0.0018),
        ),
        code=("optim/muon.py:shape_factor", "optim/muon.py:move_"),
        tests=("optim/test_muon.py::test_shape_factors_of_the_records",),
        public=(
            "No log isolates it. Effective steps: 0.010 square and 0.020 for the MLP in record 5, 0.05, 0.10 and "
            "0.05 from record 13 on."
        ),
        cost="None.",
    ),
    Technique(
        key="momentum-warmup",
        title="Momentum warm-up",
        what=(
            "Muon's momentum rises from 0.85 to 0.95 over the first 300 steps, so that early gradients, which soon "
            "point elsewhere, are forgotten sooner. Its length does not scale with the run."
        ),
        formula="μ(s) = 0.85 + 0.10 · min(s/300, 1)",
        record=9,
        presets=records(13, 18),
        switches=(
            Switch("optim.muon.momentum_start", on=0.85, off=0.95),
            Switch("optim.muon.momentum_warmup_steps", on=300, off=0),
        ),
        code=("optim/schedules.py:muon_momentum",),
        tests=(
            "optim/test_schedules.py::test_momentum_warms_up_over_300_steps",
            "optim/test_schedules.py::test_momentum_without_warm_up_is_constant_from_step_0",
            "recipes/test_records.py::test_the_momentum_at_every_step",
        ),
        public="No log isolates it.",
        cost="None.",
    ),
    Technique(
        key="shared-muon-work",
        title="Muon's work shared by ranks",
        what=(
            "Each process orthogonalises its share of the matrices and the results are gathered, so that all end with "
            "the same weights as if each had done everything. Record 14 sums a vector of all matrices; from record 15 "
            "on an asynchronous gather runs while the next matrices are computed, and record 17 copes with a number "
            "of matrices that ranks do not divide."
        ),
        record=6,
        presets=records(4, 18),
        code=(
            "parallel/matrices.py:share_over",
            "parallel/matrices.py:deal",
            "optim/muon.py:ShareWork",
            "optim/muon.py:Muon.step",
        ),
        tests=(
            "parallel/test_series.py::test_shared_matrices_are_all_of_them_each_done_once",
            "parallel/test_ranks.py::test_every_matrix_is_dealt_once_and_no_rank_has_two_more_than_another",
            "optim/test_muon.py::test_work_shared_by_three_processes_gives_the_same_weights",
            "optim/test_muon.py::test_neither_order_nor_company_changes_a_matrix",
        ),
        public="No log isolates it; from record 14 to 15 a step fell from 174.10 to 161.13 ms, with half the tables.",
        cost="One gather of the block matrices in bf16, 170 MB a step.",
    ),
    Technique(
        key="one-adam",
        title="One Adam with groups",
        what=(
            "Tables, head and scalars are groups of one Adam instead of having an optimizer each. The numbers are the "
            "same; there is less to construct, step and save."
        ),
        record=18,
        presets=records(18, 18),
        switches=(Switch("optim.adam.grouping", on="one", off="per_class"),),
        code=("optim/optimizer.py:_adams", "optim/adam.py:Adam"),
        tests=("optim/test_optimizer.py::test_one_adam_or_one_per_class_gives_the_same_bits",),
        public="No log isolates it; four optimizers became two.",
        cost="None.",
    ),
    Technique(
        key="class-rates",
        title="A rate for each class of parameters",
        what=(
            "Tables learn at 0.6, the head at 0.008, scalars at 0.04, all by Adam. A row of a table is rarely touched "
            "and may move far when it is; the head is touched by every token. Off, all three have the head's rate."
        ),
        record=11,
        presets=records(13, 18),
        switches=(
            Switch("optim.adam.embedding_lr", on=0.6, off=0.008),
            Switch("optim.adam.scalar_lr", on=0.04, off=0.008),
        ),
        code=("optim/optimizer.py:_adams", "model/gpt.py:parameter_class"),
        tests=(
            "optim/test_optimizer.py::test_each_adam_class_moves_at_its_own_rate",
            "model/test_gpt.py::test_every_parameter_is_in_one_class",
        ),
        public="No log isolates it. Record 8 had 0.3 and 0.002; the present rates came with record 11.",
        cost="None.",
    ),
    Technique(
        key="adam-beta1",
        title="β₁ = 0.8",
        what=(
            "Adam averages gradients over about five steps instead of ten. Runs are short and their gradients change "
            "quickly."
        ),
        record=13,
        presets=records(13, 18),
        switches=(Switch("optim.adam.beta1", on=0.8, off=0.9),),
        code=("optim/adam.py:adam_",),
        tests=(
            "optim/test_adam.py::test_fp32_agrees_with_torch",
            "optim/test_optimizer.py::test_every_switch_is_alive",
        ),
        public="No log isolates it.",
        cost="None.",
    ),
    Technique(
        key="cooldown-share",
        title="Cool-down as a share of the run",
        what=(
            "All rates stay at their base and then fall along a line to nearly 0 over the last 40 % of the run. Older "
            "records give the length in steps; a share keeps its meaning when the run is made shorter. There is no "
            "warm-up of rates."
        ),
        formula="τ = 1 − s/N; multiplier = min(1, τ/0.4)",
        record=18,
        presets=records(18, 18),
        switches=(
            Switch("optim.schedule.cooldown_share", on=0.4, off=None),
            Switch("optim.schedule.cooldown_steps", on=None, off=600),
        ),
        code=("optim/schedules.py:lr_scale", "optim/schedules.py:cooldown_steps_of"),
        tests=(
            "optim/test_schedules.py::test_record_18_cools_over_its_last_556_steps",
            "optim/test_schedules.py::test_a_cooldown_in_steps_follows_the_record_exactly",
            "recipes/test_records.py::test_the_rate_at_every_step",
        ),
        public="No log isolates it; 600 of 1,490 steps became 556 of 1,390, the same share.",
        cost="None.",
    ),
    Technique(
        key="gradient-clipping",
        title="Gradient clipping",
        what=(
            "All gradients are scaled down together where their common norm exceeds a limit. No record clips: Muon "
            "does not feel the size of a gradient at all, and Adam hardly does. It is here as a safety net and to be "
            "asked about."
        ),
        formula="G ← G · min(1, limit / ‖G‖)",
        presets=(),
        switches=(Switch("optim.clip_norm", on=1.0, off=None),),
        code=("optim/optimizer.py:Optimizer._clip",),
        tests=("optim/test_optimizer.py::test_clipping_is_that_of_torch",),
        public="No record has it, though one description sees it in the softcap.",
        cost="One norm over all gradients a step.",
    ),
)
