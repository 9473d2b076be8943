// Package election lets one of several replicas work: the one that holds a Lease.
//
// The Lease is given up only after the work has stopped, so that two replicas
// never work at the same time, and losing it does not end the process: the replica
// drains and goes back to waiting. The protocol is that of client-go.
package election
