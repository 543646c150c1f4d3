"""What is the matter with a run: a sign that lasts, a probe that tells its causes apart, and what it means.

    signs       ─ what training reported of itself, and whether it changed by more than its noise
    probing     ─ what a runner can be asked, and trials that are run to find out
    case        ─ one trial with its signs and its probes; what a rule is
    infrastructure, configuration, learning, reward ─ the rules, one cause each
    diagnose    ─ goes over a study's trials and writes into its book what it finds

Thresholds are for every study the same, and were chosen on planted failures (`bench.researching.planted`) with other
seeds than those they are scored on. A run keeps its score whatever is the matter with it; only one whose environment
or server died has none, and is repeated.
"""
