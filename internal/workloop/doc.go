// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package workloop runs workers over a queue of keys. It provides what every controller needs
// around its sync function: one worker per key, back-off per key, a limit of workers per group of
// keys, recovery from panics, a pause while the driver is unavailable, draining at shutdown, log
// lines and metrics.
//
// A key that fails is logged with severity error, once per text of the error until it succeeds. Failures whose cause is expected to
// pass, and repetitions, are logged at verbosity 1.
package workloop
