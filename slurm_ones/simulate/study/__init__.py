"""Studies, which compare policies: plans, runs, figures, and their presentation."""
