// Package workloop drains a queue of plain keys with a number of workers. It
// owns what every loop needs around its sync function and nothing of what sync
// does: one worker per key, back-off per key, recovered panics, the pause while
// the driver is away, draining on shutdown, the log line and the metrics.
package workloop
