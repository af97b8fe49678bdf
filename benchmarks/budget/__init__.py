"""The benchmark of equal budgets: cutoff, consolidation, proof, and a synchronous baseline."""
