package nodecontroller

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// strippable tells whether pvc has an obsolete finalizer. Whose claim it is does not
// matter: nobody is left who would remove the finalizer.
func (r claimRules) strippable(pvc *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(pvc.Finalizers, func(f string) bool { return slices.Contains(r.obsolete, f) })
}

// strip removes all obsolete finalizers of pvc in one write.
func (t *claimsTerm) strip(ctx context.Context, pvc *corev1.PersistentVolumeClaim) error {
	err := t.changeClaim(ctx, pvc, kube.MetadataPatch{RemoveFinalizers: t.c.rules.obsolete})
	t.c.metrics.finalizer(actionStrip, err)
	if err != nil {
		err = fmt.Errorf("removing obsolete finalizers of claim %q (the permission to patch persistentvolumeclaims is needed): %w", kube.Key(pvc), err)
		t.tellBlocked(pvc, err)
		return err
	}
	klog.FromContext(ctx).Info("Obsolete finalizers removed", "finalizers", t.c.rules.obsolete)
	return nil
}
