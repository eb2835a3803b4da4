"""Views for people: text, charts, and HTML pages."""
