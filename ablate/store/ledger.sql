-- Tables of a ledger; ledger.py explains their meaning.

CREATE TABLE sweep (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;

CREATE TABLE arms (arm INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, knobs TEXT NOT NULL, baseline
    INTEGER REFERENCES arms, optuna INTEGER, place INTEGER, role TEXT NOT NULL, repeats INTEGER
    REFERENCES arms, reason TEXT);

CREATE INDEX repeats_of_an_arm ON arms (repeats) WHERE repeats IS NOT NULL;

CREATE TABLE trials (trial INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, spec TEXT NOT NULL, status
    TEXT NOT NULL DEFAULT 'pending', reason TEXT, seconds REAL, reused INTEGER NOT NULL DEFAULT 0);

CREATE TABLE members (arm INTEGER REFERENCES arms, seed INTEGER, trial INTEGER NOT NULL REFERENCES
    trials, mlflow TEXT, shipped INTEGER NOT NULL DEFAULT -1, closed INTEGER NOT NULL DEFAULT 0,
    wanted INTEGER NOT NULL DEFAULT 1, PRIMARY KEY (arm, seed)) WITHOUT ROWID;

CREATE INDEX members_of_a_trial ON members (trial);

CREATE TABLE attempts (trial INTEGER REFERENCES trials, attempt INTEGER, started REAL, ended REAL,
    outcome TEXT, reason TEXT, PRIMARY KEY (trial, attempt)) WITHOUT ROWID;

CREATE TABLE names (name INTEGER PRIMARY KEY, text TEXT UNIQUE NOT NULL);

CREATE TABLE records (trial INTEGER, name INTEGER, step INTEGER, value REAL, time REAL, PRIMARY KEY
    (trial, name, step)) WITHOUT ROWID;

CREATE TABLE events (trial INTEGER, step INTEGER, text TEXT, PRIMARY KEY (trial, step, text))
    WITHOUT ROWID;

CREATE TABLE context_free (trial INTEGER PRIMARY KEY, loss REAL);

CREATE TABLE compared (id TEXT PRIMARY KEY, signature TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE row_seals (part TEXT, key TEXT, seal TEXT, PRIMARY KEY (part, key)) WITHOUT ROWID;
