"""The journal's tables. Rows are only ever added, except groups (their state), notes (their counts) and what a durable
checkpoint lets go.

Token arrays are little-endian blobs: int32 for tokens and versions, float64 for log-probabilities (bit for bit what
was reported); `allowed` is packed by `timeline.allowed`. `pieces` are the encoded bytes of the suffix's and the
completion's tokens, joined, with the length of each in `piece_lengths` (int32). `ask` is a JSON object, see
`types.Ask`; `carry` is one of numbers, see `Batch.carry`. `noted` and `refused` are objects of counts, see `Episode`.

A journal of an older schema is brought forward by `MIGRATIONS` when it is opened.
"""

SCHEMA_VERSION = 7

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    name TEXT NOT NULL,
    opened REAL NOT NULL,
    touched REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'dropped')),
    reason TEXT NOT NULL,
    closed REAL,
    for_batch INTEGER,
    task_set TEXT NOT NULL DEFAULT '',
    code_version TEXT NOT NULL DEFAULT ''
);
CREATE INDEX groups_dropped ON groups (for_batch) WHERE state = 'dropped';

CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    client_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_set TEXT NOT NULL,
    group_name TEXT NOT NULL,
    group_id INTEGER REFERENCES groups (id),
    mode TEXT NOT NULL CHECK (mode IN ('train', 'eval')),
    policy_version INTEGER NOT NULL,
    begun REAL NOT NULL,
    code_version TEXT NOT NULL DEFAULT '',
    team TEXT NOT NULL DEFAULT '',
    at_version INTEGER,
    temperature REAL,
    instance_id TEXT NOT NULL DEFAULT ''
);
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_of_team ON episodes (team) WHERE team != '';
CREATE INDEX episodes_of_code ON episodes (code_version) WHERE code_version != '';
CREATE INDEX episodes_of_client ON episodes (client_id) WHERE instance_id != '';
CREATE INDEX episodes_of_instance ON episodes (client_id, instance_id) WHERE instance_id != '';

CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL REFERENCES episodes (id),
    role TEXT NOT NULL,
    parent TEXT,
    kept INTEGER NOT NULL,
    suffix BLOB NOT NULL,
    completion BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    versions BLOB NOT NULL,
    pieces BLOB NOT NULL,
    piece_lengths BLOB NOT NULL,
    temperature REAL NOT NULL,
    finish_reason TEXT NOT NULL,
    response TEXT NOT NULL,
    prompt_key TEXT NOT NULL,
    created REAL NOT NULL,
    ask TEXT NOT NULL DEFAULT '{}',
    fork TEXT NOT NULL DEFAULT '',
    retry_of TEXT,
    context BLOB NOT NULL DEFAULT x'',
    allowed BLOB NOT NULL DEFAULT x'',
    untrained TEXT NOT NULL DEFAULT ''
);
CREATE INDEX calls_of_episode ON calls (episode_id, seq);

CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE notes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    noted TEXT NOT NULL,
    refused TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE promises (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    prepared REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE finishes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE aborts (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    status TEXT NOT NULL CHECK (status IN ('aborted', 'expired')),
    reason TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL,
    for_batch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX aborts_for_batch ON aborts (for_batch);

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE batch_groups (
    group_id INTEGER PRIMARY KEY REFERENCES groups (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    position INTEGER NOT NULL
);
CREATE TABLE batch_members (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    group_position INTEGER NOT NULL,
    position INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX members_of_batch ON batch_members (batch_id, group_position, position);

CREATE TABLE steps (
    batch_id INTEGER PRIMARY KEY REFERENCES batches (id),
    metrics TEXT NOT NULL,
    learned REAL NOT NULL
);

CREATE TABLE checkpoints (
    policy_version INTEGER PRIMARY KEY,
    digest TEXT NOT NULL
);

CREATE TABLE idempotency (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    episode_id TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL
);
"""

MIGRATIONS = {
    1: """
    ALTER TABLE calls ADD COLUMN ask TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE calls ADD COLUMN fork TEXT NOT NULL DEFAULT '';
    ALTER TABLE calls ADD COLUMN retry_of TEXT;
    ALTER TABLE calls ADD COLUMN context BLOB NOT NULL DEFAULT x'';
    CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
    2: """
    ALTER TABLE calls ADD COLUMN allowed BLOB NOT NULL DEFAULT x'';
    ALTER TABLE episodes ADD COLUMN code_version TEXT NOT NULL DEFAULT '';
    ALTER TABLE episodes ADD COLUMN team TEXT NOT NULL DEFAULT '';
    ALTER TABLE episodes ADD COLUMN at_version INTEGER;
    CREATE INDEX episodes_of_team ON episodes (team) WHERE team != '';
    CREATE INDEX episodes_of_code ON episodes (code_version) WHERE code_version != '';
    ALTER TABLE groups ADD COLUMN task_set TEXT NOT NULL DEFAULT '';
    ALTER TABLE groups ADD COLUMN code_version TEXT NOT NULL DEFAULT '';
    UPDATE groups SET task_set = COALESCE((SELECT task_set FROM episodes WHERE group_id = groups.id LIMIT 1), '');
    ALTER TABLE batches ADD COLUMN carry TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE promises (
        episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
        reward REAL NOT NULL,
        by_role TEXT NOT NULL,
        metrics TEXT NOT NULL,
        prepared REAL NOT NULL
    ) WITHOUT ROWID;
    """,
    3: """
    ALTER TABLE episodes ADD COLUMN temperature REAL;
    """,
    4: """
    ALTER TABLE batches DROP COLUMN seed;
    """,
    5: """
    UPDATE meta SET key = 'origin', value = json_object('model.name', value) WHERE key = 'model';
    """,
    6: """
    CREATE TABLE checkpoints (policy_version INTEGER PRIMARY KEY, digest TEXT NOT NULL);
    INSERT INTO meta SELECT 'undigested_until', COALESCE(
        (SELECT MAX(batch_id) + 1 FROM steps), (SELECT value FROM meta WHERE key = 'base_version'), 0
    );
    ALTER TABLE episodes ADD COLUMN instance_id TEXT NOT NULL DEFAULT '';
    CREATE INDEX episodes_of_client ON episodes (client_id) WHERE instance_id != '';
    CREATE INDEX episodes_of_instance ON episodes (client_id, instance_id) WHERE instance_id != '';
    CREATE TABLE notes (
        episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
        noted TEXT NOT NULL,
        refused TEXT NOT NULL
    ) WITHOUT ROWID;
    ALTER TABLE calls ADD COLUMN untrained TEXT NOT NULL DEFAULT '';
    """,
}
"""From each older version to the next."""
