BEGIN TRANSACTION;
CREATE TABLE batch_members (
    episode_id TEXT PRIMARY KEY,
    batch_id INTEGER NOT NULL,
    group_position INTEGER NOT NULL,
    position INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "batch_members" VALUES('ep_000000f424009732b040c862ac8',0,0,0);
INSERT INTO "batch_members" VALUES('ep_000000f4240200348fc83495a50',0,0,1);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    composed REAL NOT NULL,
    carry TEXT NOT NULL
);
INSERT INTO "batches" VALUES(0,'{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.2,"clip_high":0.2,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"token_mean","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":0.00002,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-8,"max_grad_norm":1.0},"optimizers":{}}',1000.0,'{}');
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    episode_id TEXT NOT NULL,
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
INSERT INTO "calls" VALUES(1,'ep_000000f424009732b040c862ac8.1','ep_000000f424009732b040c862ac8','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0000000000000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(2,'ep_000000f4240200348fc83495a50.2','ep_000000f4240200348fc83495a50','',NULL,0,X'0100000002000000',X'0700000008000000',X'676666666666E6BF9A9999999999E9BF',X'0000000000000000',X'7070C3A937C3A938',X'01000000010000000300000003000000',1.0,'stop','{"role":"assistant","content":"(7, 8)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(5,'ep_000000f4240b46bf0c57a022918.5','ep_000000f4240b46bf0c57a022918','',NULL,0,X'0100000002000000',X'05000000',X'000000000000E0BF',X'01000000',X'7070C3A935',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(5,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(6,'ep_000000f4240a4b1c7879f7fe68a.6','ep_000000f4240a4b1c7879f7fe68a','',NULL,0,X'0100000002000000',X'07000000',X'676666666666E6BF',X'01000000',X'7070C3A937',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(7,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(7,'ep_000000f4240ee86b5d7aae9e0a4.7','ep_000000f4240ee86b5d7aae9e0a4','',NULL,0,X'0100000002000000',X'09000000',X'CDCCCCCCCCCCECBF',X'01000000',X'7070C3A939',X'010000000100000003000000',1.0,'stop','{"role":"assistant","content":"(9,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
INSERT INTO "calls" VALUES(8,'ep_000000f4240a4b1c7879f7fe68a.8','ep_000000f4240a4b1c7879f7fe68a','','ep_000000f4240a4b1c7879f7fe68a.6',3,X'03000000',X'08000000',X'9A9999999999E9BF',X'01000000',X'70C3A938',X'0100000003000000',1.0,'stop','{"role":"assistant","content":"(8,)","reasoning":"","tool_calls":[{"id":"c1","name":"add","arguments":"{\"a\": 1}"}],"tool_call_id":"","name":""}','prompt',1000.0,'{"messages":[],"after":null,"tools":[],"fingerprint":"","instructed":false}','',NULL,X'',X'','');
CREATE TABLE checkpoints (
    policy_version INTEGER PRIMARY KEY,
    digest TEXT NOT NULL
);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    time REAL NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,'episode',1000.0,'{"episode_id":"ep_000000f424009732b040c862ac8","status":"live","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":""}');
INSERT INTO "events" VALUES(2,'episode',1000.0,'{"episode_id":"ep_000000f4240200348fc83495a50","status":"live","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":""}');
INSERT INTO "events" VALUES(3,'episode',1000.0,'{"episode_id":"ep_000000f424009732b040c862ac8","status":"finished","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":"","reward":0.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(4,'episode',1000.0,'{"episode_id":"ep_000000f4240200348fc83495a50","status":"finished","mode":"train","task_id":"t","task_set":"","group":"learned","client_id":"x","code_version":"","team":"","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(5,'group',1000.0,'{"group":"learned","client_id":"x","state":"complete","reason":"","episodes":["ep_000000f424009732b040c862ac8","ep_000000f4240200348fc83495a50"]}');
INSERT INTO "events" VALUES(6,'step',1000.0,'{"policy_version":1,"metrics":{"reward/mean":0.5,"reward/std":0.5,"episode/num_turns":1.0,"completion/tokens":2.0,"batch/episodes":2.0,"batch/unscorable":0.0,"batch/sampled_tokens":4.0,"groups/zero_variance":0.0,"groups/dropped":0,"episodes/aborted":0.0,"episodes/expired":0.0,"forest/tree_token_ratio":2.0,"forest/tokens":4.0,"batch/staleness_max":0.0,"episode/timelines":1.0,"completion/truncated":0.0,"forest/orphans":0.0,"forest/orphan_tokens":0.0,"forest/side_calls":0.0,"forest/drift":0.0,"policy/entropy":0.5}}');
INSERT INTO "events" VALUES(7,'episode',1000.0,'{"episode_id":"ep_000000f4240b40b18f87b01eeb0","status":"live","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"t1"}');
INSERT INTO "events" VALUES(8,'episode',1000.0,'{"episode_id":"ep_000000f4240929889b17b4acc6f","status":"live","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"t1"}');
INSERT INTO "events" VALUES(9,'episode',1000.0,'{"episode_id":"ep_000000f4240b40b18f87b01eeb0","status":"finished","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"t1","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(10,'episode',1000.0,'{"episode_id":"ep_000000f4240929889b17b4acc6f","status":"finished","mode":"train","task_id":"t","task_set":"","group":"equal","client_id":"anonymous","code_version":"","team":"t1","reward":1.0,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(11,'group',1000.0,'{"group":"equal","client_id":"anonymous","state":"dropped","reason":"zero_variance","episodes":["ep_000000f4240b40b18f87b01eeb0","ep_000000f4240929889b17b4acc6f"]}');
INSERT INTO "events" VALUES(12,'episode',1000.0,'{"episode_id":"ep_000000f42405f887c4de14918ff","status":"live","mode":"train","task_id":"t","task_set":"","group":"left","client_id":"anonymous","code_version":"","team":"t1"}');
INSERT INTO "events" VALUES(13,'episode',1000.0,'{"episode_id":"ep_000000f42405f887c4de14918ff","status":"aborted","mode":"train","task_id":"t","task_set":"","group":"left","client_id":"anonymous","code_version":"","team":"t1","reward":null,"reason":"broken","num_calls":0}');
INSERT INTO "events" VALUES(14,'group',1000.0,'{"group":"left","client_id":"anonymous","state":"dropped","reason":"no_members","episodes":[]}');
INSERT INTO "events" VALUES(15,'episode',1000.0,'{"episode_id":"ep_000000f4240b46bf0c57a022918","status":"live","mode":"eval","task_id":"t","task_set":"","group":"e","client_id":"anonymous","code_version":"","team":""}');
INSERT INTO "events" VALUES(16,'code_version',1000.0,'{"code_version":"v1","client_id":"anonymous"}');
INSERT INTO "events" VALUES(17,'episode',1000.0,'{"episode_id":"ep_000000f4240a4b1c7879f7fe68a","status":"live","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":"t2"}');
INSERT INTO "events" VALUES(18,'episode',1000.0,'{"episode_id":"ep_000000f4240ee86b5d7aae9e0a4","status":"live","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":"t2"}');
INSERT INTO "events" VALUES(19,'episode',1000.0,'{"episode_id":"ep_000000f4240ee86b5d7aae9e0a4","status":"prepared","mode":"train","task_id":"t","task_set":"algebra","group":"g","client_id":"anonymous","code_version":"v1","team":"t2","reward":0.25,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(20,'episode',1000.0,'{"episode_id":"ep_000000f4240b46bf0c57a022918","status":"prepared","mode":"eval","task_id":"t","task_set":"","group":"e","client_id":"anonymous","code_version":"","team":"","reward":0.5,"reason":"","num_calls":1}');
INSERT INTO "events" VALUES(21,'episode',1000.0,'{"episode_id":"ep_000000f4240b46bf0c57a022918","status":"finished","mode":"eval","task_id":"t","task_set":"","group":"e","client_id":"anonymous","code_version":"","team":"","reward":0.5,"reason":"","num_calls":1}');
CREATE TABLE facts (seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
INSERT INTO "facts" VALUES(1,'[["episode",{"id":"ep_000000f4240b46bf0c57a022918","status":"prepared","reward":0.5}]]');
INSERT INTO "facts" VALUES(2,'[["episode",{"id":"ep_000000f4240b46bf0c57a022918","status":"finished","ended":1000.0}]]');
INSERT INTO "facts" VALUES(3,'[["episode",{"id":"ep_000000f4240a4b1c7879f7fe68a","num_calls":2,"num_tokens":2}]]');
CREATE TABLE idempotency (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    episode_id TEXT NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE TABLE instances (
    number INTEGER PRIMARY KEY,
    client_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    UNIQUE (client_id, instance_id)
);
INSERT INTO "instances" VALUES(1,'x','p1');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('job_settings','{"revision":1,"given":{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.0,"clip_high":0.0,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"auto","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":2e-05,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-08,"max_grad_norm":1.0},"optimizers":{}},"job":{"batch_size":1,"group_size":2,"min_group_size":2,"spare_groups":0,"spare_episodes":0,"max_staleness":0,"task_weights":{},"mix_code_versions":false,"max_steps":0,"temperature":1.0,"max_tokens":256,"history":"template","lease_seconds":100.0,"max_episode_seconds":1000.0,"micro_batch_tokens":8192,"checkpoint_every":20,"keep_checkpoints":2,"keep_best":true,"seed":0,"side_calls":[],"sampling":{"override":[]},"algorithm":{"advantage":"grpo","loss":"clip","clip_low":0.0,"clip_high":0.0,"dual_clip":0.0,"kl_coef":0.0,"aggregation":"auto","constant":0.0,"correction":"none","correction_low":0.5,"correction_high":2.0,"epochs":1,"mini_batches":1,"by_role":false,"drop_zero_variance":true,"max_dropped_groups":0},"optimizer":{"lr":2e-05,"warmup_steps":0,"schedule":"constant","total_steps":0,"min_lr_ratio":0.0,"weight_decay":0.0,"beta1":0.9,"beta2":0.99,"eps":1e-08,"max_grad_norm":1.0},"optimizers":{}}}');
INSERT INTO "meta" VALUES('origin','{"model.name": "small", "model.dtype": "bfloat16"}');
INSERT INTO "meta" VALUES('schema_version','9');
CREATE TABLE operations (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('forward_backward', 'optim_step')),
    batch_id INTEGER NOT NULL
);
INSERT INTO "operations" VALUES(0,'forward_backward',0);
INSERT INTO "operations" VALUES(1,'optim_step',0);
CREATE TABLE settled_episodes (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    team TEXT NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "settled_episodes" VALUES(1,'ep_000000f424009732b040c862ac8','finished','','{"id":"ep_000000f424009732b040c862ac8","seq":1,"client_id":"x","task_id":"t","task_set":"","group":"learned","group_id":1,"mode":"train","policy_version":0,"begun":1000.0,"status":"finished","ended":1000.0,"reward":0.0,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":2,"trained_in":0,"oldest_version":0,"dropped":"","code_version":"","team":"","at_version":null,"temperature":null,"instance_id":"p1","noted":{},"refused":{}}');
INSERT INTO "settled_episodes" VALUES(2,'ep_000000f4240200348fc83495a50','finished','','{"id":"ep_000000f4240200348fc83495a50","seq":2,"client_id":"x","task_id":"t","task_set":"","group":"learned","group_id":1,"mode":"train","policy_version":0,"begun":1000.0,"status":"finished","ended":1000.0,"reward":1.0,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":2,"trained_in":0,"oldest_version":0,"dropped":"","code_version":"","team":"","at_version":null,"temperature":null,"instance_id":"p1","noted":{},"refused":{}}');
INSERT INTO "settled_episodes" VALUES(3,'ep_000000f4240b40b18f87b01eeb0','finished','t1','{"id":"ep_000000f4240b40b18f87b01eeb0","seq":3,"client_id":"anonymous","task_id":"t","task_set":"","group":"equal","group_id":2,"mode":"train","policy_version":1,"begun":1000.0,"status":"finished","ended":1000.0,"reward":1.0,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":2,"trained_in":null,"oldest_version":1,"dropped":"zero_variance","code_version":"","team":"t1","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}}');
INSERT INTO "settled_episodes" VALUES(4,'ep_000000f4240929889b17b4acc6f','finished','t1','{"id":"ep_000000f4240929889b17b4acc6f","seq":4,"client_id":"anonymous","task_id":"t","task_set":"","group":"equal","group_id":2,"mode":"train","policy_version":1,"begun":1000.0,"status":"finished","ended":1000.0,"reward":1.0,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":2,"trained_in":null,"oldest_version":1,"dropped":"zero_variance","code_version":"","team":"t1","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}}');
INSERT INTO "settled_episodes" VALUES(5,'ep_000000f42405f887c4de14918ff','aborted','t1','{"id":"ep_000000f42405f887c4de14918ff","seq":5,"client_id":"anonymous","task_id":"t","task_set":"","group":"left","group_id":3,"mode":"train","policy_version":1,"begun":1000.0,"status":"aborted","ended":1000.0,"reward":null,"by_role":{},"metrics":{},"reason":"broken","num_calls":0,"num_tokens":0,"trained_in":null,"oldest_version":null,"dropped":"","code_version":"","team":"t1","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}}');
INSERT INTO "settled_episodes" VALUES(6,'ep_000000f4240b46bf0c57a022918','finished','','{"id":"ep_000000f4240b46bf0c57a022918","seq":6,"client_id":"anonymous","task_id":"t","task_set":"","group":"e","group_id":null,"mode":"eval","policy_version":1,"begun":1000.0,"status":"finished","ended":1000.0,"reward":0.5,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":1,"trained_in":null,"oldest_version":1,"dropped":"","code_version":"","team":"","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}}');
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 0), body TEXT NOT NULL);
INSERT INTO "snapshot" VALUES(0,'{"episodes":[{"id":"ep_000000f4240b46bf0c57a022918","seq":6,"client_id":"anonymous","task_id":"t","task_set":"","group":"e","group_id":null,"mode":"eval","policy_version":1,"begun":1000.0,"status":"live","ended":null,"reward":null,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":1,"trained_in":null,"oldest_version":1,"dropped":"","code_version":"","team":"","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}},{"id":"ep_000000f4240a4b1c7879f7fe68a","seq":7,"client_id":"anonymous","task_id":"t","task_set":"algebra","group":"g","group_id":4,"mode":"train","policy_version":1,"begun":1000.0,"status":"live","ended":null,"reward":null,"by_role":{},"metrics":{},"reason":"","num_calls":1,"num_tokens":1,"trained_in":null,"oldest_version":1,"dropped":"","code_version":"v1","team":"t2","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}},{"id":"ep_000000f4240ee86b5d7aae9e0a4","seq":8,"client_id":"anonymous","task_id":"t","task_set":"algebra","group":"g","group_id":4,"mode":"train","policy_version":1,"begun":1000.0,"status":"prepared","ended":null,"reward":0.25,"by_role":{"critic":1.0},"metrics":{},"reason":"","num_calls":1,"num_tokens":1,"trained_in":null,"oldest_version":1,"dropped":"","code_version":"v1","team":"t2","at_version":null,"temperature":null,"instance_id":"","noted":{},"refused":{}}],"groups":[{"id":4,"client_id":"anonymous","name":"g","opened":1000.0,"touched":1000.0,"members":["ep_000000f4240a4b1c7879f7fe68a","ep_000000f4240ee86b5d7aae9e0a4"],"state":"open","reason":"","closed":null,"task_set":"algebra","code_version":"v1"}],"counts":{"live":2,"prepared":1,"finished":4,"aborted":1,"expired":0,"trained":2,"waiting":0,"dropped":2},"code_versions":{"v1":[2,0,0,0.0,8]},"losses":{"1/groups/zero_variance":1,"1/episodes/aborted":1,"1/groups/no_members":1},"scalars":{"policy_version":1,"base_version":-1,"durable_version":0,"composed":false,"num_episodes":8,"num_groups":4,"carry":{}}}');
CREATE TABLE steps (
    batch_id INTEGER PRIMARY KEY,
    metrics TEXT NOT NULL,
    learned REAL NOT NULL
);
INSERT INTO "steps" VALUES(0,'{"reward/mean":0.5,"reward/std":0.5,"episode/num_turns":1.0,"completion/tokens":2.0,"batch/episodes":2.0,"batch/unscorable":0.0,"batch/sampled_tokens":4.0,"groups/zero_variance":0.0,"groups/dropped":0,"episodes/aborted":0.0,"episodes/expired":0.0,"forest/tree_token_ratio":2.0,"forest/tokens":4.0,"batch/staleness_max":0.0,"episode/timelines":1.0,"completion/truncated":0.0,"forest/orphans":0.0,"forest/orphan_tokens":0.0,"forest/side_calls":0.0,"forest/drift":0.0,"policy/entropy":0.5}',1000.0);
CREATE TABLE undelivered (call_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE INDEX calls_of_episode ON calls (episode_id, seq);
CREATE INDEX members_of_batch ON batch_members (batch_id, group_position, position);
CREATE INDEX operations_of_batch ON operations (batch_id);
CREATE INDEX settled_by_status ON settled_episodes (status, seq);
CREATE INDEX settled_by_team ON settled_episodes (team, seq) WHERE team != '';
CREATE INDEX events_of_kind ON events (kind, seq) WHERE kind IN ('evaluation', 'rollback');
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',21);
COMMIT;
