// Package csitest is a CSI driver in the process of a test. It remembers volumes,
// snapshots and publications as the CSI spec demands, records every call in order,
// and answers otherwise where a script says so:
//
//	plugin.Next("ControllerPublishVolume", csitest.Hang(), csitest.Fail(codes.Aborted, "pending"))
//
// makes the next two calls hang and fail, and the third succeed.
package csitest
