"""The cluster backend: learner ranks and sampler replicas in processes of their own, on one or more machines."""
