// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
)

// AddFlags adds the flags that each role with a loop has to fs: the timeout of a call of the driver, and the retry intervals. Their
// defaults are the values of the variables.
func AddFlags(fs *pflag.FlagSet, timeout, start, longest *time.Duration) {
	fs.DurationVar(timeout, "timeout", *timeout, "timeout of each CSI call")
	fs.DurationVar(start, "retry-interval-start", *start, "first delay after a failure; doubles with each further failure")
	fs.DurationVar(longest, "retry-interval-max", *longest, "longest delay after a failure")
}

// ValidateFlags returns an error for each of these values that is not positive.
func ValidateFlags(timeout, start, longest time.Duration) error {
	var errs []error
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{{"timeout", timeout}, {"retry-interval-start", start}, {"retry-interval-max", longest}} {
		if d.value <= 0 {
			errs = append(errs, fmt.Errorf("--%s: must be positive, got %v", d.flag, d.value))
		}
	}
	return errors.Join(errs...)
}
