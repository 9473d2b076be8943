// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
)

// swarm is a subset of all faults, disasters and users. Those that remain meet each other more often, so that combinations occur that are
// rare among all.
type swarm struct {
	disasters []int          // numbers of disaster
	without   map[fault]bool // that do not occur
	groups    uint           // of steps that users do not take, as bits
}

// fault is a kind of fault, or with callCode and a code, the response of a driver.
type fault int

// Kinds of faults. The first ones are the indexes of requestFault.
const (
	requestLost fault = iota
	requestResponseLost
	requestInternalError
	requestTimeout
	requestConflict
	watchFault
	responseLost
	callResponseLost
	responseDelayed
	callTakesEffect
	lastFault
	callCode fault = 100
)

// disasterKinds are the numbers of each kind of disaster, more numbers for a more frequent one.
var disasterKinds = [][]int{
	{stopsReplica}, {crashes, crashes + 1, crashes + 2}, {freezes, freezes + 1}, {partitions, partitions + 1}, {clockJumps}, {unpublishes},
	{denies, denies}, {suspends, suspends}, {strips},
}

// Numbers of disasters. Others restart the driver.
const (
	stopsReplica = 0
	crashes      = 1
	freezes      = 4
	partitions   = 6
	clockJumps   = 8
	unpublishes  = 9
	denies       = 10
	suspends     = 11
	strips       = 12
)

// userGroups is the number of groups of steps that users take, without the first.
const userGroups = 7

// pickSwarm draws a swarm. One in three has everything.
func (s *simulation) pickSwarm() swarm {
	w := swarm{without: map[fault]bool{}}
	all := s.choices.Pick(3) == 0
	has := func() bool { return all || s.choices.Pick(2) == 0 }
	for _, kind := range disasterKinds {
		if has() {
			w.disasters = append(w.disasters, kind...)
		}
	}
	for f := range lastFault {
		w.without[f] = !has()
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		w.without[callCode+fault(code)] = !has()
	}
	for i := range userGroups {
		if !has() {
			w.groups |= 1 << (i + 1)
		}
	}
	return w
}

// pickMore draws what does not depend on the kind of history.
func (s *simulation) pickMore(size *scale) {
	size.features.Without = s.swarm.groups
	s.pickThrottle(size)
	s.pickRoles(size)
	if s.choices.Pick(5) == 4 {
		size.protection = "off"
		s.happens("claims are never protected")
	}
	size.features.Static = !size.features.Topology && !size.features.Secrets && s.choices.Pick(3) == 2
	size.features.Backups = !size.features.Topolvm && s.choices.Pick(3) == 2
	size.features.Shared = !size.features.Topology && s.choices.Pick(3) == 2
}

// pickDisaster returns the number of a disaster, or false if the history has none.
func (s *simulation) pickDisaster() (int, bool) {
	if len(s.swarm.disasters) == 0 {
		return 0, false
	}
	n := s.swarm.disasters[s.choices.Pick(len(s.swarm.disasters))]
	s.happens(fmt.Sprint("disaster ", n))
	return n, true
}

// has reports whether a kind of fault occurs.
func (w swarm) has(f fault) bool { return !w.without[f] }

// codes returns those of all with which calls fail.
func (w swarm) codes(all []codes.Code) []codes.Code {
	return slices.DeleteFunc(all, func(code codes.Code) bool { return !w.has(callCode + fault(code)) })
}
