INSERT INTO jobs (id, kind, "user", state, request, digest, priority, created, started, finished, attempts, cost, bound, answer, document, reason, idempotency_key)
VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'plan', 'ann', 'optimal', '{"n":1}', 'a2c042106748487f16eacb6515e940a41c8fa058a86ad2d49e8a812cf1ff2405', 0, 1000.5, 1001.0, 1002.0, 1, 2.5, 2.5, '{"cost_seconds": 2.5}', '{"plan": "ü"}', '', 'once');
INSERT INTO jobs (id, kind, "user", state, request, digest, priority, created, started, attempts, reason, worker, leased_until)
VALUES ('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 'plan', 'bob', 'solving', '{"n":2}', '80b0210c6d1e8e0efa30c540462bcbe7d4a7c5084adfbd0d35e30d8ad515c41a', 0, 1001.0, 1001.5, 1, '', 'gone', 1016.5);
INSERT INTO jobs (id, kind, "user", state, request, digest, priority, created, attempts, reason)
VALUES ('cccccccccccccccccccccccccccccccc', 'jobshop', 'ann', 'queued', '{"n":3}', '018664222e3d28f2b4088d1948f304e6dc1d5ad1aea9094cbf2103cc38265df6', 0, 1002.0, 0, '');
INSERT INTO jobs (id, kind, "user", state, request, digest, priority, created, finished, attempts, reason)
VALUES ('dddddddddddddddddddddddddddddddd', 'plan', 'bob', 'failed', '{"n":9}', '00942182555dd25d4b04013fa640936dfb28feec25cd1a7ce41817e232bfbd77', 0, 1003.0, 1004.0, 1, 'no plan');
INSERT INTO events (job, at, name, data) VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 1000.5, 'queued', '{}');
INSERT INTO events (job, at, name, data) VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 1001.0, 'solving', '{}');
INSERT INTO events (job, at, name, data) VALUES ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 1002.0, 'optimal', '{"stopped_by": null}');
INSERT INTO events (job, at, name, data) VALUES ('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 1001.0, 'queued', '{}');
INSERT INTO events (job, at, name, data) VALUES ('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 1001.5, 'solving', '{}');
INSERT INTO events (job, at, name, data) VALUES ('cccccccccccccccccccccccccccccccc', 1002.0, 'queued', '{}');
INSERT INTO events (job, at, name, data) VALUES ('dddddddddddddddddddddddddddddddd', 1003.0, 'queued', '{}');
DELETE FROM events WHERE job = 'dddddddddddddddddddddddddddddddd';
DELETE FROM jobs WHERE id = 'dddddddddddddddddddddddddddddddd';
INSERT INTO tokens (digest, "user", scope, created) VALUES ('22eb6d980850a149c59b839faa767680788cd8c3c290cbe782b27c3aabb43c31', 'ann', 'submit', 999.0);
