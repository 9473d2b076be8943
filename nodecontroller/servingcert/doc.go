// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package servingcert provides the certificate with which the webhooks serve. Every replica polls
// its source and loads the certificate when it changes; a bad pair never replaces a good one:
//
//   - files: tls.crt and tls.key in a directory, such as a mounted Secret of cert-manager;
//   - secret: the same keys in a Secret, which another program writes;
//   - self-signed: the same Secret, which this program writes.
//
// # Self-signed
//
// The leader renews the pair if less than a third of its lifetime is left. A replica without a usable one
// does so, too: the leader may be a process without webhooks. [Manager.renew] takes one step at a time, and
// the process may exit between any two of them:
//
//  1. It generates an authority and a pair, and stores the pair in the Secret as next.crt and next.key,
//     which no replica loads. The key of the authority is discarded.
//  2. It adds the authority to the CA bundles in the MutatingWebhookConfiguration, beside those
//     that are there, and gives API servers until the next round to trust it.
//  3. It makes the pair the one that replicas load.
//
// Each write carries the resourceVersion that was read. If another replica was faster, the next round
// continues with the pair of that replica. The CA bundles are also written again whenever another program
// removes an authority that a replica needs. Earlier authorities stay until they expire: to revoke a pair,
// delete the Secret, wait until all replicas have loaded the next pair, and empty the CA bundles.
package servingcert
