"""What real clusters recorded of their jobs, each format read into one form."""
