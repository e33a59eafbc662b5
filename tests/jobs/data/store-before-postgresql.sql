CREATE TABLE jobs (
	id VARCHAR(32) NOT NULL,
	kind VARCHAR(40) NOT NULL,
	"user" VARCHAR(200) NOT NULL,
	state VARCHAR(12) NOT NULL,
	request TEXT NOT NULL,
	digest VARCHAR(64) NOT NULL,
	priority INTEGER NOT NULL,
	created FLOAT NOT NULL,
	started FLOAT,
	finished FLOAT,
	stopped_by VARCHAR(8),
	asked VARCHAR(8),
	attempts INTEGER NOT NULL,
	cost FLOAT,
	bound FLOAT,
	answer TEXT,
	document TEXT,
	reason TEXT NOT NULL,
	cached_from VARCHAR(32),
	idempotency_key VARCHAR(200),
	worker VARCHAR(64),
	leased_until FLOAT,
	PRIMARY KEY (id),
	CONSTRAINT once UNIQUE ("user", idempotency_key)
);
CREATE INDEX waiting ON jobs (state, priority, created);
CREATE INDEX of_user ON jobs ("user", created, id);
CREATE INDEX alike ON jobs (digest, state);
CREATE TABLE tokens (
	digest VARCHAR(64) NOT NULL,
	"user" VARCHAR(200) NOT NULL,
	scope VARCHAR(8) NOT NULL,
	created FLOAT NOT NULL,
	PRIMARY KEY (digest)
);
CREATE TABLE events (
	number BIGSERIAL NOT NULL,
	job VARCHAR(32) NOT NULL,
	at FLOAT NOT NULL,
	name VARCHAR(20) NOT NULL,
	data TEXT NOT NULL,
	PRIMARY KEY (number),
	FOREIGN KEY(job) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE INDEX of_job ON events (job, number);
