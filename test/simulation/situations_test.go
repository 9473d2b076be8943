// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"slices"
	"testing"
)

// swarmSituations are the situations that histories with a swarm must have.
func swarmSituations() []string {
	situations := []string{
		"a call is throttled", "a request is refused", "a webhook removes a record", "a volume is published to two nodes",
		"a suspended process continues while another replica leads",
		"a suspended process continues with a request or response of an ended context",
		"processes run different roles", "claims are never protected",
	}
	for _, kind := range disasterKinds {
		situations = append(situations, fmt.Sprint("disaster ", kind[0]))
	}
	return situations
}

// TestSwarmSituations: histories with a swarm have all situations that they are drawn for.
func TestSwarmSituations(t *testing.T) {
	missing, all := swarmSituations(), statistics{}
	for n := uint64(1); len(missing) > 0 && n < 1000; n++ {
		all.add(Run(t, n, nil))
		missing = slices.DeleteFunc(missing, func(situation string) bool { return all.situations[situation] > 0 })
	}
	if len(missing) > 0 {
		t.Errorf("never: %q; counted: %v", missing, all.situations)
	}
	t.Logf("all after %d histories", len(all.steps))
}
