"""Authenticated connections between the processes of one job: nobody else can join its training.

`secret` is what they share, `proof` how two of them show that they have it, `door` lets in who does, `frames` is how
bytes are cut into messages. `server` and `client` are a store that they all see, and `rendezvous` has torch use it.
"""
