"""Authenticated connections between the processes of one job: no other process can join its training.

`secret` is the shared key, `proof` shows that both ends have the key, and `door` accepts callers that prove it.
`frames` cuts bytes into messages. `server` and `client` are a shared key-value store, which `rendezvous` gives to
torch.
"""
