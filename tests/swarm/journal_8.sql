BEGIN TRANSACTION;
CREATE TABLE aborts (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    status TEXT NOT NULL CHECK (status IN ('aborted', 'expired')),
    reason TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL,
    for_batch INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "aborts" VALUES('ep_000000f42406aab04ad88446f3f','aborted','broken',0,0,1000.0,1);
CREATE TABLE batch_groups (
    group_id INTEGER PRIMARY KEY REFERENCES groups (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    position INTEGER NOT NULL
);
INSERT INTO "batch_groups" VALUES(1,0,0);
CREATE TABLE batch_members (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    group_position INTEGER NOT NULL,
    position INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "batch_members" VALUES('ep_000000f4240e2f91db350bc9750',0,0,0);
INSERT INTO "batch_members" VALUES('ep_000000f42407cc2cb5871704d8c',0,0,1);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL DEFAULT '{}'
);
INSERT INTO "batches" VALUES(0,'{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.2,"clip_high":0.2,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"token_mean","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":0.00002,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-8,"max_grad_norm":1.0}}',1000.0,'{}');
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
INSERT INTO "calls" VALUES(1,'ep_000000f4240e2f91db350bc9750.1','ep_000000f4240e2f91db350bc9750','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0000000000000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(2,'ep_000000f42407cc2cb5871704d8c.2','ep_000000f42407cc2cb5871704d8c','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0000000000000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(3,'ep_000000f4240182fd325312cc456.3','ep_000000f4240182fd325312cc456','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0100000001000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(4,'ep_000000f4240e177b0fd91796383.4','ep_000000f4240e177b0fd91796383','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0100000001000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(5,'ep_000000f4240835e63f37fefd6d3.5','ep_000000f4240835e63f37fefd6d3','',NULL,0,X'0100000002000000',X'05000000',X'000000000000E0BF',X'01000000',X'7070C3A935',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(5,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(6,'ep_000000f42400a0de76d081fef3d.6','ep_000000f42400a0de76d081fef3d','',NULL,0,X'0100000002000000',X'07000000',X'676666666666E6BF',X'01000000',X'7070C3A937',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(7,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(7,'ep_000000f42400a0de76d081fef3d.7','ep_000000f42400a0de76d081fef3d','','ep_000000f42400a0de76d081fef3d.6',3,X'03000000',X'08000000',X'9A9999999999E9BF',X'01000000',X'70C3A938',X'0100000003000000',1.0,'stop','{"role":"assistant","content":"(8,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(8,'ep_000000f42403122baa5ee72480c.8','ep_000000f42403122baa5ee72480c','',NULL,0,X'0100000002000000',X'09000000',X'CDCCCCCCCCCCECBF',X'01000000',X'7070C3A939',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(9,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
CREATE TABLE checkpoints (
    policy_version INTEGER PRIMARY KEY,
    digest TEXT NOT NULL
);
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
INSERT INTO "episodes" VALUES(1,'ep_000000f4240e2f91db350bc9750','x','t','','learned',1,'train',0,1000.0,'','',NULL,NULL,'p1');
INSERT INTO "episodes" VALUES(2,'ep_000000f42407cc2cb5871704d8c','x','t','','learned',1,'train',0,1000.0,'','',NULL,NULL,'p1');
INSERT INTO "episodes" VALUES(3,'ep_000000f4240182fd325312cc456','anonymous','t','','equal',2,'train',1,1000.0,'','',NULL,NULL,'');
INSERT INTO "episodes" VALUES(4,'ep_000000f4240e177b0fd91796383','anonymous','t','','equal',2,'train',1,1000.0,'','',NULL,NULL,'');
INSERT INTO "episodes" VALUES(5,'ep_000000f42406aab04ad88446f3f','anonymous','t','','left',3,'train',1,1000.0,'','',NULL,NULL,'');
INSERT INTO "episodes" VALUES(6,'ep_000000f4240835e63f37fefd6d3','anonymous','t','','e',NULL,'eval',1,1000.0,'','',NULL,NULL,'');
INSERT INTO "episodes" VALUES(7,'ep_000000f42400a0de76d081fef3d','anonymous','t','algebra','g',4,'train',1,1000.0,'v1','',NULL,NULL,'');
INSERT INTO "episodes" VALUES(8,'ep_000000f42403122baa5ee72480c','anonymous','t','algebra','g',4,'train',1,1000.0,'v1','',NULL,NULL,'');
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,'episode',1000.0,'{"episode_id":"ep_000000f4240e2f91db350bc9750","status":"live","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":""}');
INSERT INTO "events" VALUES(2,'episode',1000.0,'{"episode_id":"ep_000000f42407cc2cb5871704d8c","status":"live","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":""}');
INSERT INTO "events" VALUES(3,'episode',1000.0,'{"episode_id":"ep_000000f4240e2f91db350bc9750","status":"finished","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":"","reward":0.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(4,'episode',1000.0,'{"episode_id":"ep_000000f42407cc2cb5871704d8c","status":"finished","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":"","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(5,'group',1000.0,'{"group":"learned","client_id":"x","state":"complete","reason":"","episodes":["ep_000000f4240e2f91db350bc9750","ep_000000f42407cc2cb5871704d8c"]}');
INSERT INTO "events" VALUES(6,'step',1000.0,'{"policy_version":1,"metrics":{"reward/mean":0.5,"reward/std":0.5,"episode/num_turns":1.0,"completion/tokens":2.0,"batch/episodes":2.0,"batch/unscorable":0.0,"batch/sampled_tokens":4.0,"groups/zero_variance":0.0,"groups/dropped":0,"episodes/aborted":0.0,"episodes/expired":0.0,"policy/entropy":0.5}}');
INSERT INTO "events" VALUES(7,'episode',1000.0,'{"episode_id":"ep_000000f4240182fd325312cc456","status":"live","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":""}');
INSERT INTO "events" VALUES(8,'episode',1000.0,'{"episode_id":"ep_000000f4240e177b0fd91796383","status":"live","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":""}');
INSERT INTO "events" VALUES(9,'episode',1000.0,'{"episode_id":"ep_000000f4240182fd325312cc456","status":"finished","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(10,'episode',1000.0,'{"episode_id":"ep_000000f4240e177b0fd91796383","status":"finished","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(11,'group',1000.0,'{"group":"equal","client_id":"anonymous","state":"dropped","reason":"zero_variance","episodes":["ep_000000f4240182fd325312cc456","ep_000000f4240e177b0fd91796383"]}');
INSERT INTO "events" VALUES(12,'episode',1000.0,'{"episode_id":"ep_000000f42406aab04ad88446f3f","status":"live","mode":"train","task_id":"t","task_set":"","group":"left","client_id":"anonymous","code_version":"","team":""}');
INSERT INTO "events" VALUES(13,'episode',1000.0,'{"episode_id":"ep_000000f42406aab04ad88446f3f","status":"aborted","mode":"train","task_id":"t","task_set":"","group":"left","client_id":"anonymous","code_version":"","team":"","reward":null,"reason":"broken","num_calls":0}');
INSERT INTO "events" VALUES(14,'group',1000.0,'{"group":"left","client_id":"anonymous","state":"dropped","reason":"no_members","episodes":[]}');
INSERT INTO "events" VALUES(15,'episode',1000.0,'{"episode_id":"ep_000000f4240835e63f37fefd6d3","status":"live","mode":"eval","task_id":"t","task_set":"","group":"e","client_id":"anonymous","code_version":"","team":""}');
INSERT INTO "events" VALUES(16,'episode',1000.0,'{"episode_id":"ep_000000f4240835e63f37fefd6d3","status":"finished","mode":"eval","task_id":"t","task_set":"","group":"e","client_id":"anonymous","code_version":"","team":"","reward":0.5,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(17,'code_version',1000.0,'{"code_version":"v1","client_id":"anonymous"}');
INSERT INTO "events" VALUES(18,'episode',1000.0,'{"episode_id":"ep_000000f42400a0de76d081fef3d","status":"live","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":""}');
INSERT INTO "events" VALUES(19,'episode',1000.0,'{"episode_id":"ep_000000f42403122baa5ee72480c","status":"live","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":""}');
INSERT INTO "events" VALUES(20,'episode',1000.0,'{"episode_id":"ep_000000f42403122baa5ee72480c","status":"prepared","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":"","reward":0.25,"reason":"","num_calls":1}');
CREATE TABLE finishes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    num_calls INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    ended REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "finishes" VALUES('ep_000000f4240182fd325312cc456',1.0,'{}','{}',1,2,1000.0);
INSERT INTO "finishes" VALUES('ep_000000f42407cc2cb5871704d8c',1.0,'{}','{}',1,2,1000.0);
INSERT INTO "finishes" VALUES('ep_000000f4240835e63f37fefd6d3',0.5,'{}','{}',1,1,1000.0);
INSERT INTO "finishes" VALUES('ep_000000f4240e177b0fd91796383',1.0,'{}','{}',1,2,1000.0);
INSERT INTO "finishes" VALUES('ep_000000f4240e2f91db350bc9750',0.0,'{}','{}',1,2,1000.0);
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
INSERT INTO "groups" VALUES(1,'x','learned',1000.0,1000.0,'complete','',1000.0,NULL,'','');
INSERT INTO "groups" VALUES(2,'anonymous','equal',1000.0,1000.0,'dropped','zero_variance',1000.0,1,'','');
INSERT INTO "groups" VALUES(3,'anonymous','left',1000.0,1000.0,'dropped','no_members',1000.0,1,'','');
INSERT INTO "groups" VALUES(4,'anonymous','g',1000.0,1000.0,'open','',NULL,NULL,'algebra','v1');
CREATE TABLE idempotency (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    episode_id TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('job_settings','{"revision":1,"given":{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.0,"clip_high":0.0,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"auto","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":2e-05,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-08,"max_grad_norm":1.0}},"job":{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.0,"clip_high":0.0,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"auto","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":2e-05,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-08,"max_grad_norm":1.0}}}');
INSERT INTO "meta" VALUES('schema_version','8');
CREATE TABLE notes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    noted TEXT NOT NULL,
    refused TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE operations (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL REFERENCES batches (id)
);
INSERT INTO "operations" VALUES(0,'forward_backward',0);
INSERT INTO "operations" VALUES(1,'optim_step',0);
CREATE TABLE promises (
    episode_id TEXT PRIMARY KEY REFERENCES episodes (id),
    reward REAL NOT NULL,
    by_role TEXT NOT NULL,
    metrics TEXT NOT NULL,
    prepared REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "promises" VALUES('ep_000000f42403122baa5ee72480c',0.25,'{"critic":1.0}','{}',1000.0);
CREATE TABLE steps (
    batch_id INTEGER PRIMARY KEY REFERENCES batches (id),
    metrics TEXT NOT NULL,
    learned REAL NOT NULL
);
INSERT INTO "steps" VALUES(0,'{"reward/mean":0.5,"reward/std":0.5,"episode/num_turns":1.0,"completion/tokens":2.0,"batch/episodes":2.0,"batch/unscorable":0.0,"batch/sampled_tokens":4.0,"groups/zero_variance":0.0,"groups/dropped":0,"episodes/aborted":0.0,"episodes/expired":0.0,"policy/entropy":0.5}',1000.0);
CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE INDEX groups_dropped ON groups (for_batch) WHERE state = 'dropped';
CREATE INDEX episodes_of_group ON episodes (group_id);
CREATE INDEX episodes_of_team ON episodes (team) WHERE team != '';
CREATE INDEX episodes_of_code ON episodes (code_version) WHERE code_version != '';
CREATE INDEX episodes_of_client ON episodes (client_id) WHERE instance_id != '';
CREATE INDEX episodes_of_instance ON episodes (client_id, instance_id) WHERE instance_id != '';
CREATE INDEX calls_of_episode ON calls (episode_id, seq);
CREATE INDEX aborts_for_batch ON aborts (for_batch);
CREATE INDEX members_of_batch ON batch_members (batch_id, group_position, position);
CREATE INDEX operations_of_batch ON operations (batch_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',20);
COMMIT;
