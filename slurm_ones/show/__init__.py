"""What people are shown: text, charts, and HTML pages."""
