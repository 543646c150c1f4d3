"""Behaviour locks: what a user sees must not change while the code behind it does.

Pinned here:

1. `recorded/*.tar.xz`: data dirs of schema 14. `small` has every kind of episode, group, batch and call; `long` has
   10,000 episodes; `rolled` was rolled back, and `branched` began at one of its checkpoints. A later schema must open,
   migrate and answer them. `earlier` is `tests/recorded_data_dir.tar.xz`, of before columns were added.
2. `test_read_routes`: the answers of every GET route over these data dirs: of a server that opened them, and of `look`,
   which reads them. A route without an answer here needs a reason. The form of all bodies, from `/openapi.json`.
3. `test_commands`: the output of every command that lists or shows, for people and as JSON. A command without an output
   here needs a reason.
4. `test_transcripts`: the bytes that the SDKs of OpenAI and Anthropic and a plain HTTP client send, and the answers.
5. `test_replay`: the weights after a recorded journal, replayed by each backend, bit by bit.

A test that fails shows the difference and writes all present answers to a file. If the change is meant to be seen,
record again, read the difference in git, and say in the commit why users get it:

    python -m tests.locks.record answers      # 2 and 3, over the recorded data dirs
    python -m tests.locks.record transcripts  # 4
    python -m tests.locks.record data-dirs    # 1, by this version of AgentJet; then `answers`. Rarely right: the data
                                              # dirs are there because they are of an earlier version

Values that depend on the moment or the machine are replaced by a name: see `answers.normalised`.
"""
