// Package explain tells why a claim, a volume, an attachment or a node is in the state that
// it is in, and what happens next and by whom.
//
// It works as the loops do: gather.go reads what there is, a read per thing and nothing of
// it more than once; functions without side effects turn that into findings; and print.go
// writes them. What may not be read becomes a finding that says so. Of secrets nothing but
// their metadata is asked for, so that their values never leave the API server.
package explain
