"""The figures: a module each, with what it draws in `numbers(root)` and how in `draw(figure, numbers)`.

A module names the files it reads (`DATA`, and `ALSO` those it uses where they exist, from the checkout's root), how to
make them (`MAKE`), and what it quotes from others (`REPORTED`). `harnessrl figures` draws them.
"""

FIGURES = (
    "fig3_retokenization",
    "fig4_baseline",
    "fig5_normalizers",
    "fig7_lookup",
    "fig8_babyai",
    "fig9_ablation",
    "fig10_samples",
    "training",
    "outcomes",
    "ablations",
    "laboratory",
    "drift_by_length",
    "template_breaks",
    "substitute_bias",
    "tree_savings",
)
"""Figure 6 of the paper compares schedules, of which one exists so far."""
