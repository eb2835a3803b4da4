"""A process of the job: its place among the ranks, its signals, its errors, its end, its log. No torch."""
