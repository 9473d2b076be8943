// Package servingcert provides the certificate with which the webhooks serve. Every replica
// loads it from its source and reloads it when it changes; a bad pair never replaces a good one:
//
//   - files: tls.crt and tls.key in a directory, such as a mounted Secret of cert-manager;
//   - secret: the same keys in a Secret, which another program writes;
//   - self-signed: the same Secret, which the leader writes.
//
// # Self-signed
//
// The leader renews the pair if less than a third of its lifetime is left, or if the Secret has no
// usable one. [Manager.renew] takes three steps, and the process may exit between any two of them:
//
//  1. It generates an authority and a pair. The key of the authority is discarded.
//  2. It adds the authority to the CA bundles in the MutatingWebhookConfiguration, beside those
//     that are there, and waits until API servers trust it. After an exit here the bundle has
//     one authority that signs nothing, and the pair before is still trusted.
//  3. It stores the pair in the Secret, at the resourceVersion that it read. If another leader
//     was faster, the next round adopts the pair of that leader.
//
// Authorities that no replica needs are removed an hour after the pair was generated. The CA
// bundles are also written again whenever another program removes the authority.
package servingcert
