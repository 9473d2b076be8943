// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"errors"
	"time"
)

// ErrDrain is the cancellation cause that drains a loop at shutdown. The loop starts no further
// key. Calls of sync that are running at the end of [Loop.Run]'s context may finish within
// [Config.GracePeriod], then their contexts are canceled. Any other cause, and a lost Lease ([election.Held]),
// cancels them immediately.
var ErrDrain = errors.New("shutting down")

// APIGrace is the part of a [Config.GracePeriod] for the API writes that follow the last call to the
// driver, which has its own timeout.
const APIGrace = 10 * time.Second
