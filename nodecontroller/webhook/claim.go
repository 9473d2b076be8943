package webhook

// rawClaim is what is read of a claim. What is nil is absent or null.
type rawClaim struct {
	Metadata *rawMeta `json:"metadata"`
	Spec     struct {
		StorageClassName *string `json:"storageClassName"`
	} `json:"spec"`
}

// class is the name of the class of the claim; "" for none. The default is not looked
// for: admission has filled it in before, where there is one.
func (p *rawClaim) class() string {
	var annotations map[string]string
	if p.Metadata != nil {
		annotations = p.Metadata.Annotations
	}
	if name := className(annotations, p.Spec.StorageClassName); name != nil {
		return *name
	}
	return ""
}

// decideClaim says what becomes of a claim whose class has provisioner, "" where there
// is no such class: then the name is that of classless volumes made by hand.
func (c Config) decideClaim(claim *rawClaim, provisioner string) verdict {
	if provisioner == "" || provisioner != c.Driver {
		return verdict{reason: "Foreign"}
	}
	ops := finalizerPatch(claim.Metadata, c.ClaimFinalizer)
	if len(ops) == 0 {
		return verdict{reason: "Protected"}
	}
	return verdict{patch: ops, reason: "Unprotected"}
}
