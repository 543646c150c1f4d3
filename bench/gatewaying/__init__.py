"""The processes of `bench.gateway`: a gateway without a model, LiteLLM's proxy without one, and the load on both."""
