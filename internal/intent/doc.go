// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package intent has the states and rules of a call with effects, and the memory of the calls of a term. Every role of the
// controller has the same promise: a call that may have happened is recorded on an object before it is sent, it is repeated with
// equal arguments until its outcome is definite, and nothing else is decided meanwhile.
//
// [State] and [Event] say what may happen to a call, [Next] which step follows, and [Ledger] keeps the calls. docs/architecture.md
// draws the states. The package has no client, no clock and no loop: a role gathers [Facts], asks Next, and carries out the step.
//
// rules.go has the rules by name. In the order in which they apply: the record of a finished call is removed; a record of an earlier
// process is confirmed and resumed; a planned call that is no longer wanted, or that has the record of another, is abandoned, and so is
// one of an earlier process whose record was removed; an unknown outcome is recorded; a result is written; a rejected effect is undone; a
// call is recorded before it is sent, and again if its record was removed; and nothing is sent that a cache from before the term decides.
package intent
