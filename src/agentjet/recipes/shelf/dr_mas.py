"""Dr. MAS."""

from __future__ import annotations

from agentjet.recipes.shelf.grpo import Grpo


class DrMas(Grpo):
    """Dr. MAS: GRPO for each role of a team apart, over the episodes in which the role has calls.

        A_i,role = (r_i,role - mean) / (std + 1e-6), over the group's episodes in which the role has calls

    Source: github.com/langfengQ/DrMAS at 19c632b. Confidence: reproduced, except that each episode counts once and not
    each call.
    Use: teams whose roles differ in difficulty, or in how often they have calls.
    Cost: as GRPO.
    """

    name: str = "dr_mas"
    by_role: bool = True
    """Compute the advantages of each role only over the episodes in which the role has calls."""
