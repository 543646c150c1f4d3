"""The parts that run in or beside vLLM: the process of a replica, its engine, and what its Python imports."""
