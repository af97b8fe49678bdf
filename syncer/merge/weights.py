"""How much each responder counts in a round (numerics.md section 2)."""

from __future__ import annotations


def learner_weight(tokens: int, steps: int, equal: bool = False) -> float:
    """w_m of one response (N5).

    Args:
        tokens: c_tokens since the learner's base.
        steps: c_steps since the learner's base; 0 gives weight 0.
        equal: `--learner-weight equal`, every responder counts 1.

    Returns:
        tokens^2 / steps in f64 from exactly converted integers, or 1.
    """
    if equal:
        return 1.0
    if steps == 0:
        return 0.0
    return float(tokens) * float(tokens) / float(steps)
