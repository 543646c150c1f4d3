"""The cluster backend: learner ranks and sampler replicas are separate processes, on one or more machines."""
