"""Processes of a server: how they are started, connected, watched and ended. No torch.

`rpc` has the messages. `supervisor` starts and watches processes, on this machine or, by the `conductor`, with Ray.
"""
