"""`make gpu` itself: its harness, and its checks as far as a CPU goes."""
