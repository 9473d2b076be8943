// Package webhook answers the admission requests of the node controller (contract,
// section 3): pods get the capacity that their claims will need written on them, for a
// scheduler that asks for it, and claims get the finalizer that lets pods be deleted
// before them. It runs on every replica, whoever leads.
//
//	review.go   HTTP: what is refused, and what an answer looks like
//	gather.go   what is known of claims and classes: the caches, and reads.go for live reads
//	pod.go      what becomes of a pod         claim.go  what becomes of a claim
//	patch.go    the fewest operations that make it so
//	certs.go    the pair that is served       files.go, secret.go  where it comes from
//	selfsigned.go, upkeep.go, pki.go  the pair that the leader makes by itself
//
// Two rules have a history. An object is never encoded again from a Go type, because
// that takes away the fields which the type does not know; and what could not be found
// out is an HTTP error and no denial, so that the failure policy of the administrator
// decides.
package webhook
