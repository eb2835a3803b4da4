"""The job's network: nobody else can join."""
