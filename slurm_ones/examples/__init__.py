"""Example programs to read and to build on."""
