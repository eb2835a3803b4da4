"""What is submitted when: generated workloads, measured profiles, and files of published studies."""
