// Package csiclient is the connection to the CSI driver: one connection per
// process, what the driver says about itself, what the answer to a call means,
// and the metrics and redacted logs of all calls.
//
// A lost connection does not end the process. The client becomes not ready, which
// holds the workers (see [Client.WaitReady]), dials again, and asks the driver again
// who it is and what it can do; only a driver that has become another one is an
// error.
package csiclient
