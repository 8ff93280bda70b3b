"""`prove_rule(op, samples)` tries the rule of one operator, a user's own too (`docs/add-a-rule.md`)."""

from __future__ import annotations

from meshc.testing.rule_proof import Proof, prove_rule

__all__ = ["Proof", "prove_rule"]
