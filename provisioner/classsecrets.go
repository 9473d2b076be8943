package provisioner

import "errors"

// ClassSecret is a secret that a StorageClass names; namespace and name may be templates.
type ClassSecret struct {
	// Purpose is what it is for, as it begins the parameters: provisioner,
	// controller-publish and so on.
	Purpose, Namespace, Name string
}

// ClassSecrets is the secrets that the parameters of a StorageClass name. The error is
// everything that is wrong with these parameters by themselves.
func ClassSecrets(parameters map[string]string) ([]ClassSecret, error) {
	var secrets []ClassSecret
	var errs []error
	for _, item := range []struct {
		purpose string
		kind    secretKind
	}{
		{"provisioner", secretProvisioner}, {"controller-publish", secretControllerPublish}, {"node-stage", secretNodeStage},
		{"node-publish", secretNodePublish}, {"controller-expand", secretControllerExpand}, {"node-expand", secretNodeExpand},
		{"controller-modify", secretControllerModify},
	} {
		for _, k := range []secretKind{item.kind, secretDefault} {
			name, namespace, err := k.templates(parameters)
			if err != nil {
				errs = append(errs, err)
				break
			}
			if name != nil {
				secrets = append(secrets, ClassSecret{item.purpose, *namespace, *name})
				break
			}
		}
	}
	return secrets, errors.Join(errs...)
}
