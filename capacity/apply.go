package capacity

import (
	"context"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ask asks the driver about i.
func (t *term) ask(ctx context.Context, i item, class *storagev1.StorageClass) (answer, error) {
	call, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	response, err := t.c.deps.CSI.GetCapacity(call, request(class, i.Segment))
	if err != nil {
		return answer{}, fmt.Errorf("asking the driver for the capacity of StorageClass %q in %q (GetCapacity): %w", i.Class, i.Segment, err)
	}
	a, err := parse(response)
	if err != nil {
		return answer{}, fmt.Errorf("capacity of StorageClass %q in %q: %w", i.Class, i.Segment, err)
	}
	return a, nil
}

// publish has the object of i say a. It is looked up again, since the call may have taken
// long: somebody may have made one meanwhile, or none may be wanted any more.
func (t *term) publish(ctx context.Context, i item, a answer) error {
	s := t.gather(i)
	have := decide(s).keep
	switch {
	case have != nil:
		return t.update(ctx, have, a)
	case s.class == nil || !s.there:
		return nil // and the event that told so has queued i
	case a.capacity.IsZero():
		return nil // nothing published says as much as nothing available, and costs nothing
	}
	return t.create(ctx, i, a)
}

// create makes the object of i.
func (t *term) create(ctx context.Context, i item, a answer) error {
	obj, err := t.c.objects.Create(ctx, t.c.publisher.object(i, a), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating the CSIStorageCapacity of StorageClass %q in %q: %w", i.Class, i.Segment, err)
	}
	t.published.Observe(obj)
	t.world.seen(obj)
	klog.FromContext(ctx).Info("Capacity published", "csiStorageCapacity", klog.KObj(obj), "capacity", obj.Capacity)
	return nil
}

// update has the object have say a; nothing is written when it does.
func (t *term) update(ctx context.Context, have *storagev1.CSIStorageCapacity, a answer) error {
	want, differs := t.c.publisher.change(have, a)
	if !differs {
		return nil
	}
	data, err := mergePatch(have, want)
	if err != nil {
		return err
	}
	obj, err := t.c.objects.Patch(ctx, have.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if apierrors.IsForbidden(err) {
		obj, err = t.updateInstead(ctx, have, a, err)
	}
	if err != nil {
		if kube.IsNotFound(err) {
			t.published.MarkDeleted(have) // the next attempt makes another
		}
		return fmt.Errorf("updating CSIStorageCapacity %q: %w", have.Name, err)
	}
	t.published.Observe(obj)
	klog.FromContext(ctx).V(1).Info("Capacity updated", "csiStorageCapacity", klog.KObj(have), "capacity", want.Capacity)
	return nil
}

// updateInstead is the way around a missing permission to patch. What is written starts
// from a live read, since the cache holds less than the object.
func (t *term) updateInstead(ctx context.Context, have *storagev1.CSIStorageCapacity, a answer, forbidden error) (*storagev1.CSIStorageCapacity, error) {
	live, err := t.c.objects.Get(ctx, have.Name, metav1.GetOptions{})
	if err != nil {
		return have, fmt.Errorf("%v; reading it to update it instead: %w", forbidden, err)
	}
	if live.UID != have.UID {
		return have, apierrors.NewNotFound(storagev1.Resource("csistoragecapacities"), have.Name)
	}
	want, _ := t.c.publisher.change(live, a)
	updated, err := t.c.objects.Update(ctx, want, metav1.UpdateOptions{})
	if err != nil {
		return have, fmt.Errorf("%v; updating it instead: %w", forbidden, err)
	}
	kube.WarnPatchForbidden(ctx, forbidden)
	return updated, nil
}

// remove deletes the very object obj, as it is known: when somebody has changed it, that
// is looked at first.
func (t *term) remove(ctx context.Context, obj *storagev1.CSIStorageCapacity) error {
	err := t.c.objects.Delete(ctx, obj.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &obj.UID, ResourceVersion: &obj.ResourceVersion}})
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting CSIStorageCapacity %q: %w", obj.Name, err)
	}
	t.published.MarkDeleted(obj)
	t.world.forget(itemOf(obj), obj.Name, obj.UID)
	klog.FromContext(ctx).Info("Capacity withdrawn", "csiStorageCapacity", klog.KObj(obj))
	return nil
}
